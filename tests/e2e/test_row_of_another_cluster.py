"""``sparserow row --explain`` of a served row whose table another cluster trains by now."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import sparserow as sr
from sparserow.deploy.observe.row_explanation import explain_row

KEYS = np.arange(8, dtype=np.uint64)
DIM = 4


def test_a_row_of_another_cluster_is_no_version_of_this_one(tmp_path: Path) -> None:
    root = str(tmp_path / "models")
    with sr.local_cluster(shards=1) as former:
        write(former, "user", 1.0, DIM)
        write(former, "item", 1.0, DIM)
        with sr.connect(former.address, "ads", staleness=None) as session:
            session.publish("ctr", root=root)
    with sr.local_cluster(shards=1) as cluster, sr.local_serving("ctr", root=root) as serving:
        write(cluster, "user", 3.0, DIM)
        write(cluster, "item", 3.0, 2 * DIM)
        address = ",".join(serving.addresses)
        row = explain_row(cluster.address, "ads/user", 5, serving=address)
        assert row.facts["version in serving"] == row.facts["version in training"], "each cluster counts for itself"
        assert row.facts["serving is"].startswith("of another cluster, ")
        assert row.facts["largest difference"] == "2"
        row = explain_row(cluster.address, "ads/item", 5, serving=address)
        assert row.facts["largest difference"] == "none: the row has dim 4 in serving and 8 in training"


def write(cluster: sr.LocalCluster, table: str, value: float, dim: int) -> None:
    with sr.connect(cluster.address, "ads", staleness=None) as session:
        rows = session.create_table(table, dim=dim, optimizer=sr.optim.SGD(lr=0.5))
        rows.assign(KEYS, np.full((len(KEYS), dim), value, np.float32))
