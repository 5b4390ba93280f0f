"""What the manifest and the workers' files hold beside rows and dense side: each item is used, and missed when it is
left out (those that ``save`` is given are in test_checkpoint.py).
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import sparserow as sr
from checkpoint_rows import rows_of_checkpoint
from sparserow.cpp_ext.torch_arrays import tensor_of
from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.checkpoint.state_tree import decode_tree
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import DataLoss, SparserowError, Unavailable
from sparserow.worker.checkpoint.state_tree import encode_tree
from sparserow.worker.data.leased import Leased
from sparserow.worker.training.data_leases import SessionLeases
from sparserow_process import wait_until

ROWS, DIM = 300, 4
KEYS = np.arange(ROWS, dtype=np.uint64)
ONES = np.ones((ROWS, DIM), np.float32)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(ROWS, DIM)
        self.item = nn.Embedding(ROWS, DIM)


@pytest.fixture(scope="module")
def cluster():
    with sr.local_cluster(shards=2, slot_count=64) as made:
        yield made


def put(url, manifest: files.Manifest) -> None:
    (Folder(str(url)) / manifest.name).put(files.FILE, manifest.to_bytes())


def without(url, item: str) -> None:
    """Takes an item out of rank 0's file."""
    manifest = files.read_manifest(Folder(str(url)))
    folder, entry = Folder(str(url)) / manifest.name, manifest.workers[0]
    tree = decode_tree(folder.read(entry.file), entry.file, tensor_of)
    del tree[item]
    encoded = encode_tree(tree, {"sparserow.rank": "0"})
    folder.write(entry.file, encoded.pieces)
    put(url, replace(manifest, workers=(replace(entry, bytes=encoded.size, xxh3=encoded.xxh3),)))


@pytest.mark.parametrize("left_out", [False, True])
def test_learning_rates_of_tables(cluster, tmp_path, left_out):
    name = f"rates-{left_out}"
    with sr.connect(cluster.address, name, rank=0, world_size=1) as session:
        session.distribute(Model(), optimizer=sr.optim.SGD(lr=1.0), min_rows=100)
        session.core.set_learning_rates({"user": 0.25, "item": 0.5})
        session.save(str(tmp_path))
    if left_out:
        without(tmp_path, "rates")
    with sr.connect(cluster.address, name, rank=0, world_size=1) as session:
        session.distribute(Model(), optimizer=sr.optim.SGD(lr=1.0), min_rows=100)
        session.restore(str(tmp_path))
        expected = {"user": 1.0, "item": 1.0} if left_out else {"user": 0.25, "item": 0.5}
        assert session.core.learning_rates() == expected


@pytest.mark.parametrize("left_out", [False, True])
def test_leased_data_goes_on_where_the_rows_are(cluster, tmp_path, left_out):
    """One chunk is done and two batches of the next one are in the rows; without the item both are trained on again."""
    name = f"leased-{left_out}"
    for is_restored in (False, True):
        with sr.connect(cluster.address, name, rank=0, world_size=1) as session:
            model = session.distribute(Model(), optimizer=sr.optim.SGD(lr=1.0), min_rows=100)
            leases = SessionLeases(session, "run", 1)
            if is_restored:
                session.restore(str(tmp_path))
                assert leases.lease(1, 4, []) == (Leased(0, epoch=1) if left_out else Leased(1, 2, epoch=1))
                break
            assert leases.lease(1, 4, []) == Leased(0, epoch=1)
            train(model, session, steps=1)
            assert leases.lease(1, 4, [0]) == Leased(1, epoch=1)
            train(model, session, steps=2)
            session.save(str(tmp_path))
            if left_out:
                manifest = files.read_manifest(Folder(str(tmp_path)))
                put(tmp_path, replace(manifest, jobs=tuple(replace(job, data={}) for job in manifest.jobs)))
            train(model, session, steps=1)  # lost with what came after the save


def train(model, session, steps: int) -> None:
    for _ in range(steps):
        (model.user(torch.arange(ROWS)) + model.item(torch.arange(ROWS))).sum().backward()
        session.step()


@pytest.mark.parametrize("left_out", [False, True])
def test_windows_keep_a_commit_from_being_applied_twice(tmp_path, left_out):
    """What the worker sends again was saved already: the window alone can tell."""
    with (
        sr.local_cluster(shards=1, slot_count=64) as cluster,
        sr.connect(cluster.address, "windows", staleness=None) as session,
    ):
        table = session.create_table("rows", dim=DIM, optimizer=sr.optim.SGD(lr=1.0))
        for _ in range(3):
            table.push(KEYS, ONES)
        session.save(str(tmp_path))
        if left_out:
            manifest = files.read_manifest(Folder(str(tmp_path)))
            jobs = [replace(job, windows=tuple({**w, "workers": []} for w in job.windows)) for job in manifest.jobs]
            put(tmp_path, replace(manifest, jobs=tuple(jobs)))
        os.kill(cluster.shard_pids[0], signal.SIGKILL)
        with ControlClient(cluster.address) as control:
            wait_until(lambda: control.status().shards[0].restores == 1, "the shard to come back")
        table.push(KEYS, ONES)
        assert table.pull(KEYS)[0, 0] == (-7 if left_out else -4)


def test_lineage_and_sequences_go_on(tmp_path):
    """Versions of what is written after a restore are above all that were given before, on another cluster too."""
    url = str(tmp_path / "ckpt")
    with sr.local_cluster(shards=1, slot_count=64) as cluster, sr.connect(cluster.address, staleness=None) as session:
        table = session.create_table("rows", dim=DIM, optimizer=sr.optim.SGD(lr=1.0))
        table.push(KEYS, ONES)
        session.save(url)
        for _ in range(2):
            session.restore(url)  # each raises the lineage
        table.push(KEYS, ONES)
        session.save(url)
    newest = max(version for version, *_ in rows_of_checkpoint(url)["default/rows"].values())
    manifest = files.read_manifest(Folder(url))
    assert newest >> 48 == manifest.lineage == 3
    for lineage, expected in ((manifest.lineage, 4), (0, 2)):
        put(url, replace(manifest, lineage=lineage))
        with (
            sr.local_cluster(shards=1, slot_count=64) as other,
            sr.connect(other.address, staleness=None) as session,
        ):
            session.restore(url)
            session.table("rows").push(KEYS[:1], ONES[:1])
            after = str(tmp_path / f"after-{lineage}")
            session.save(after)
        version = rows_of_checkpoint(after)["default/rows"][0][0]
        assert version >> 48 == expected
        assert (version > newest) == (lineage != 0), "left out, followers would take it for an older row"


def test_schemas_make_the_tables_of_another_cluster(cluster, tmp_path):
    policy = {"admit_after": 2}
    with sr.connect(cluster.address, "schemas", staleness=None, rank=0, world_size=1) as session:
        table = session.create_table(
            "rows",
            dim=DIM,
            optimizer=sr.optim.Adam(lr=0.5, betas=(0.8, 0.999)),
            dtype="float16",
            init=sr.Uniform(-1.0, 1.0),
            seed=7,
            policy=sr.RowPolicy(**policy) if hasattr(sr, "RowPolicy") else None,
        )
        table.push(KEYS, ONES)
        absent = table.pull(KEYS + np.uint64(10_000))
        session.save(str(tmp_path), config={"job": {"lr": 0.5}})
        made = table.schema
    with (
        sr.local_cluster(shards=1, slot_count=64) as other,
        sr.connect(other.address, "schemas", staleness=None) as session,
    ):
        assert session.restore(str(tmp_path)).config == {"job": {"lr": 0.5}}
        assert session.table("rows").schema == made
        np.testing.assert_array_equal(session.table("rows").pull(KEYS + np.uint64(10_000)), absent)
    manifest = files.read_manifest(Folder(str(tmp_path)))
    put(tmp_path, replace(manifest, tables=()))
    with (
        sr.local_cluster(shards=1, slot_count=64) as other,
        sr.connect(other.address, "schemas", staleness=None) as session,
    ):
        session.restore(str(tmp_path))
        with pytest.raises(sr.errors.NotFound, match="table 'rows' is not in namespace"):
            session.table("rows")


def test_rows_of_another_cluster_are_told(cluster, tmp_path):
    url = str(tmp_path)
    with sr.connect(cluster.address, "mixed", staleness=None, rank=0, world_size=1) as session:
        table = session.create_table("rows", dim=DIM, optimizer=sr.optim.SGD(lr=1.0))
        table.push(KEYS, ONES)
        session.save(url)
        manifest = files.read_manifest(Folder(url))
        table.push(KEYS[:3], ONES[:3])
        session.save(url, full_every=5)
        assert files.read_manifest(Folder(url)).base == manifest.name
        put(url, replace(manifest, cluster_id=0xABC))
        with pytest.raises(DataLoss, match="save-000002 adds to save-000001, which is of another cluster or chain"):
            session.restore(url)
        assert table.pull(KEYS[:1])[0, 0] == -2, "nothing was emptied"
        with pytest.raises(DataLoss, match=r"has rows of \S+ of cluster [0-9a-f]+; the manifest expects .* abc"):
            session.restore(url, name=manifest.name)


def test_a_worker_that_leaves_without_its_state_fails_the_save(cluster, tmp_path):
    """Its rank could not resume from such a checkpoint."""
    errors: list[SparserowError] = []
    sessions: list = [None, None]

    def connect(rank: int) -> None:
        sessions[rank] = sr.connect(cluster.address, "leaves", staleness=None, rank=rank, world_size=2)

    def save() -> None:
        try:
            sessions[0].save(str(tmp_path))
        except SparserowError as error:
            errors.append(error)

    for work in ([lambda rank=rank: connect(rank) for rank in range(2)], [save, lambda: leave(sessions[1], tmp_path)]):
        threads = [threading.Thread(target=part) for part in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
    assert [type(error) for error in errors] == [Unavailable]
    assert "left the job before they saved; save again" in str(errors[0])
    assert files.list_names(Folder(str(tmp_path))) == []
    sessions[0].save(str(tmp_path))
    sessions[0].close()
    assert len(files.read_manifest(Folder(str(tmp_path))).workers) == 1


def leave(session, folder) -> None:
    """Once the other worker's save has begun."""
    wait_until(lambda: any(folder.glob("save-*/worker.0.*")), "the other worker's state")
    session.close()
