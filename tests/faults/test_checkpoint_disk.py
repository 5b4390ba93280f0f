"""A disk that is full while a job is saved: what was saved stands, the job goes on, and saves when there is room."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import sparserow as sr
from small_disk import mounted_disk
from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.errors import ResourceExhausted

pytestmark = pytest.mark.started

DIM = 64


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with mounted_disk(tmp_path / "disk", 4) as folder:
        yield folder


def test_a_full_disk_leaves_the_old_checkpoint_and_the_job(small_disk: Path) -> None:
    url = str(small_disk / "ckpt")
    few, many = (np.arange(count, dtype=np.uint64) for count in (1000, 20_000))
    with sr.local_cluster(shards=2, slot_count=64) as cluster, sr.connect(cluster.address, staleness=None) as session:
        table = session.create_table("rows", dim=DIM, optimizer=sr.optim.Adagrad(lr=0.1))
        table.push(few, np.ones((len(few), DIM), np.float32))
        session.save(url)
        table.push(many, np.ones((len(many), DIM), np.float32))
        for _ in range(2):
            with pytest.raises(ResourceExhausted, match=r"rows\.\d\.0\.safetensors: No space left"):
                session.save(url)
            assert files.list_names(Folder(url)) == ["save-000001"]
            files.verify(Folder(url), files.read_chain(Folder(url)))
        table.push(many, np.ones((len(many), DIM), np.float32))
        expected = table.pull(many)
        subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
        session.save(url)
        table.push(many, np.ones((len(many), DIM), np.float32))
        session.restore(url)
        np.testing.assert_array_equal(table.pull(many), expected)
