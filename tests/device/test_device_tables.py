"""Tables on a device that is not the host: torch's operations give what the kernels of a shard give, to 1e-6."""

from __future__ import annotations

import numpy as np
import pytest
import sparserow as sr
import torch
from counting_device import device
from sparserow.worker.device_tables.device_tables import whole_rows
from sparserow.worker.session.in_process import InProcessCluster
from torch import nn

OPTIMIZERS = (
    sr.SGD(lr=0.3, momentum=0.9, dampening=0.1, weight_decay=1e-3),
    sr.SGD(lr=0.3, momentum=0.9, nesterov=True),
    sr.SGD(lr=0.3),
    sr.Adagrad(lr=0.3, initial_accumulator=0.1, weight_decay=1e-3),
    sr.RowWiseAdagrad(lr=0.3),
    sr.Adam(lr=0.05, weight_decay=1e-3),
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Embedding(17, 5, padding_idx=1)
        self.bag = nn.EmbeddingBag(23, 5, mode="mean")
        self.most = nn.EmbeddingBag(23, 5, mode="max")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.row(ids).sum(1) + self.bag(ids) * 2 + self.most(ids)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_a_table_on_a_device_is_as_one_on_servers(optimizer: object) -> None:
    cluster = InProcessCluster(shards=1)
    ends = []
    for placement in ("servers", "device"):
        torch.manual_seed(3)
        model, place = Net(), torch.device("cpu")
        if placement == "device":
            place = device()
            model.to(place)
        with cluster.connect(placement) as session:
            tables = {"*": sr.Table(placement=placement)}
            sr.distribute(model, session, optimizer=optimizer, min_rows=1, tables=tables)
            for step in range(8):
                for micro in range(2):
                    draw = torch.Generator().manual_seed(2 * step + micro)
                    ids = torch.randint(0, 17, (4, 3), generator=draw).to(place)
                    model(ids).square().sum().backward()
                assert session.step(clip_row_norm=20.0)
            assert session.stats().clipped_rows > 0
            if placement == "device":
                assert session.core.device_tables.table("row").weights.device == place
                rows = [whole_rows(session.core.device_tables, name).numpy() for name in ("row", "bag", "most")]
                assert session.stats().rows_pulled == 0
            else:
                sizes = {"row": 17, "bag": 23, "most": 23}
                rows = [session.table(name).pull(np.arange(size)) for name, size in sizes.items()]
            ends.append(rows)
            before = rows
            model(ids).sum().mul(float("nan")).backward()
            with pytest.raises(sr.NonFiniteGradient, match=r"table .* key"):
                session.step()
            if placement == "device":
                after = [whole_rows(session.core.device_tables, name).numpy() for name in ("row", "bag", "most")]
                assert all(map(np.array_equal, before, after))
    for here, there in zip(*ends, strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-6, atol=1e-6)
