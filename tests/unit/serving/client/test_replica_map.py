"""What a client says of the models that the serving processes have."""

from __future__ import annotations

import numpy as np
import pytest

from sparserow.proto.errors import NotFound
from sparserow.serving.client.replica_map import ReplicaMap


def test_a_model_that_is_served_by_number_is_named() -> None:
    served = {"ctr": {6: {}, 7: {}}, "cvr": {1: {}}}
    view = ReplicaMap(np.zeros(8, np.uint16), 1, (), served, {("cvr", "live"): ((1, 0, 0.0),)})
    with pytest.raises(NotFound, match=r"ctr@live is not served by every shard; served: ctr@6, ctr@7, cvr@live$"):
        view.alias("ctr", "live", None)
