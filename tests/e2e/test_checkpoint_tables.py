"""Many tables, and names that look alike: each has its rows and no other's, in few files."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

import sparserow as sr
from checkpoint_rows import rows_of_checkpoint
from gated_store import GatedStore
from restart_scene import status_of
from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.folder import Folder
from sparserow_process import Launcher, wait_until

DIM = 4
TABLES = 400


def values(number: int, count: int) -> np.ndarray:
    """(count, DIM) that no other table has."""
    return (np.arange(count * DIM, dtype=np.float32) + 1000 * number).reshape(count, DIM)


def test_tables_whose_names_look_alike_keep_their_rows(tmp_path: Path, launcher: Launcher) -> None:
    """``NAMESPACE.TABLE`` was the name of a file."""
    long = "t" * 255
    names = [("ads.v2", "user"), ("ads", "v2.user"), ("n" * 255, long), ("n" * 255, long[1:])]
    with sr.local_cluster(shards=1, slot_count=64) as cluster:
        for number, (namespace, name) in enumerate(names):
            with sr.connect(cluster.address, namespace, staleness=None) as session:
                table = session.create_table(name, dim=DIM, optimizer=sr.optim.SGD(lr=1.0))
                table.assign(np.arange(10, dtype=np.uint64), values(number, 10))
        run = launcher.start("checkpoint", "save", str(tmp_path), f"--coordinator={cluster.address}", "--verify")
        assert run.end() == 0, run.err
        assert "all as they were written" in run.out
    assert files.last_read_whole(Folder(str(tmp_path))) == "save-000001"
    with sr.local_cluster(shards=2, slot_count=64) as cluster:
        run = launcher.start("checkpoint", "restore", str(tmp_path), "--yes", f"--coordinator={cluster.address}")
        assert run.end() == 0, run.err
        for number, (namespace, name) in enumerate(names):
            with sr.connect(cluster.address, namespace, staleness=None) as session:
                found = session.table(name).pull(np.arange(10, dtype=np.uint64))
                np.testing.assert_array_equal(found, values(number, 10))


def test_small_tables_share_files(tmp_path: Path) -> None:
    """Their rows come back onto any number of shards, under other names too; a shard that ends comes back."""
    url = tmp_path / "ckpt"
    keys = np.arange(30, dtype=np.uint64)
    with sr.local_cluster(shards=2, slot_count=256) as cluster, sr.connect(cluster.address, staleness=None) as session:
        tables = [
            session.create_table(
                f"t{number}", dim=DIM, optimizer=sr.optim.Adagrad(lr=0.1), dtype=("float32", "bfloat16")[number % 2]
            )
            for number in range(TABLES)
        ]
        for number, table in enumerate(tables):
            table.assign(keys[: number % 30], values(number, number % 30))
        large = session.create_table("large", dim=64, optimizer=sr.optim.Adagrad(lr=0.1))
        many = np.arange(60_000, dtype=np.uint64)
        large.assign(many, np.ones((len(many), 64), np.float32))
        session.save(str(url), full_every=5)
        for number, table in enumerate(tables):
            table.assign(keys[:1], values(number + 1, 1))
        tables[7].delete(keys[:3])
        session.save(str(url), full_every=5)
        expected = {table.schema.full_name: table.pull(keys) for table in tables}
        manifest = files.read_manifest(Folder(str(url)))
        assert manifest.base == "save-000001"
        assert sorted(path.name for path in (url / "save-000002").glob("rows*")) == [
            "rows.0.0.safetensors",
            "rows.1.0.safetensors",
        ]
        assert len(list((url / "save-000001").glob("rows*"))) <= 10
        before = status_of(cluster.address).shards[1].pid
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: status_of(cluster.address).shards[1].restores == 1, "the shard to come back")
        for table in tables:
            np.testing.assert_array_equal(table.pull(keys), expected[table.schema.full_name])
        np.testing.assert_array_equal(large.pull(many), np.ones((len(many), 64), np.float32))
    with sr.local_cluster(shards=3, slot_count=256) as cluster, sr.connect(cluster.address, staleness=None) as session:
        session.restore(str(url), tables=["t8"], renames={"t8": "another"})
        np.testing.assert_array_equal(session.table("another").pull(keys)[:8], expected["default/t8"][:8])
        session.restore(str(url))
        for name, rows in expected.items():
            np.testing.assert_array_equal(session.table(name.partition("/")[2]).pull(keys), rows)
        session.save(str(tmp_path / "again"))
    both = [rows_of_checkpoint(tmp_path / "again")["default/t9"], rows_of_checkpoint(url, "save-000001")["default/t9"]]
    assert both[0].keys() == both[1].keys()


def test_a_chain_is_cut_short_and_loses_nothing(tmp_path: Path) -> None:
    """Forty saves of changes: none needs more than 32 others, and what is not needed goes."""
    url = tmp_path / "ckpt"
    keys = np.arange(5000, dtype=np.uint64)
    with sr.local_cluster(shards=2, slot_count=64) as cluster, sr.connect(cluster.address, staleness=None) as session:
        table = session.create_table("rows", dim=DIM, optimizer=sr.optim.SGD(lr=1.0))
        table.assign(keys, values(1, len(keys)))
        bases = []
        for number in range(40):
            session.save(str(url), full_every=1000, keep=2)
            newest = files.read_manifest(Folder(str(url)))
            assert newest.since_full == number
            assert newest.chain == len(newest.needs) <= 32
            bases.append(newest.base)
            table.push(keys[number : number + 2], np.ones((2, DIM), np.float32))
            if number == 20:
                table.delete(keys[100:103])
        assert bases.count("save-000001") == 2, "the second save, and the one that cut the chain short"
        session.save(str(url), full_every=1000, keep=2)
        expected, found = table.pull(keys), files.list_names(Folder(str(url)))
        assert len(found) < 15, "the links that were cut off are gone"
    with GatedStore(url) as store, sr.local_cluster(shards=2, slot_count=64) as cluster:
        with sr.connect(cluster.address, staleness=None) as session:
            session.restore(store.url)
            np.testing.assert_array_equal(session.table("rows").pull(keys), expected)
        read = [path for path in store.paths if "/rows." in path or "/slots." in path]
        assert len(read) == len(set(read)), "a file is read by the shard alone that has its slots"


@pytest.mark.parametrize("shards", [1, 2])
def test_a_file_says_which_slots_it_has(tmp_path: Path, shards: int) -> None:
    with (
        sr.local_cluster(shards=shards, slot_count=64) as cluster,
        sr.connect(cluster.address, staleness=None) as session,
    ):
        table = session.create_table("rows", dim=DIM, optimizer=sr.optim.SGD(lr=1.0))
        table.assign(np.arange(5000, dtype=np.uint64), values(1, 5000))
        session.save(str(tmp_path))
    manifest = files.read_manifest(Folder(str(tmp_path)))
    for part in manifest.tables[0].parts:
        assert part.first_slot == part.shard * 32
        assert part.end_slot == (64 if shards == 1 else (part.shard + 1) * 32)
    assert [(entry.first_slot, entry.end_slot) for entry in manifest.slots] == (
        [(0, 64)] if shards == 1 else [(0, 32), (32, 64)]
    )
