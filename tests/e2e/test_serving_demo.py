"""The serving part of ``sparserow demo`` begins when the model has rows."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

import sparserow as sr
from sparserow.deploy.examples.serving_demo import ServingDemo
from sparserow.proto.names import DATA_TABLE
from sparserow.worker.session.namespace_file import NamespaceFile
from sparserow_process import DEADLINE_SEC


def test_it_does_not_take_files_of_the_namespace_for_rows_of_the_model(tmp_path: Path) -> None:
    """The numbers of lines are kept there before the first step: a version without a table was published, and looking
    up one of no tables ended the demo.
    """
    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, "demo", staleness=None) as session:
        NamespaceFile(session.core, DATA_TABLE).write(b"lines")
        with sr.connect(cluster.address, "other", staleness=None) as other:
            rows = other.create_table("clicks", dim=4, optimizer=sr.optim.SGD(lr=1.0))
            rows.push(np.arange(9, dtype=np.uint64), np.ones((9, 4), np.float32))
        waits = threading.Thread(target=ServingDemo(cluster.address, "demo", str(tmp_path))._wait_for_rows, daemon=True)
        waits.start()
        waits.join(1.0)
        assert waits.is_alive()
        table = session.create_table("clicks", dim=4, optimizer=sr.optim.SGD(lr=1.0))
        table.push(np.arange(9, dtype=np.uint64), np.ones((9, 4), np.float32))
        waits.join(DEADLINE_SEC)
        assert not waits.is_alive()
