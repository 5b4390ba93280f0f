"""Shards with an SSD, as processes: more rows than memory has room for, and what stands in a shard's way."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import sparserow as sr
from shard_engine import lone_engine
from small_disk import mounted_disk
from sparserow.cpp_ext import _server
from sparserow.deploy.cli import main
from sparserow.deploy.launch.local_cluster import local_cluster
from sparserow.deploy.observe.ssd_inspection import inspect_folder
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import InvalidArgument
from sparserow.ps_server.shard.metrics import ShardMetrics
from sparserow.worker.session.table import KeyedRows
from sparserow_process import Launcher

DIM = 32
ROWS = 60_000  # of 268 bytes and more, beside an index that may grow: more than the budget of the one shard
BUDGET = "16MiB"


def test_more_rows_than_memory_are_trained_and_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ssd_options: dict[str, Any]
) -> None:
    rng = np.random.default_rng(3)
    keys = rng.permutation(ROWS)
    with local_cluster(shards=1, memory_budget=BUDGET, ssd_path=tmp_path, **ssd_options) as cluster:
        session = sr.connect(cluster.address, namespace="n")
        table = session.create_table("t", dim=DIM, optimizer=sr.optim.Adagrad(lr=0.1))
        before = {int(part[0]): table.pull(part) for part in np.array_split(keys, 12)}
        for _ in range(2):
            for part in np.array_split(keys, 12):
                table.push(part, np.ones((len(part), DIM), np.float32))
        moved = np.float32(0.1) + np.float32(0.1) / np.sqrt(np.float32(2))
        for part in np.array_split(keys, 12):
            np.testing.assert_allclose(before[int(part[0])] - table.pull(part), moved, rtol=1e-5)
        assert table.delete(keys[:1000]) == 1000
        scanned = sum(len(page[0]) for page in table.scan())
        assert scanned == ROWS - 1000
        with ControlClient(cluster.address) as control:
            shard = control.status().shards[0]
        assert shard.used_bytes <= 16 << 20
        assert shard.tables[0].rows == ROWS - 1000
        assert shard.tables[0].ssd_rows > ROWS // 20
        assert shard.tier.rows_evicted > ROWS // 2
        assert shard.tier.reads > 0
        assert shard.tier.file_bytes + shard.tier.memory_bytes > 4 << 20
        with pytest.raises(SystemExit):
            main(["status", "--coordinator", cluster.address])
        shown = capsys.readouterr().out
        assert "evicted" in shown
        assert "ms/write" in shown
        assert "waited" in shown
        assert "SSD rows" in shown
        session.close()
    left = inspect_folder(tmp_path / "shard-0")
    assert [each.name for each in left.tables] == ["n/t"]
    assert left.tables[0].rows > ROWS // 3


def test_metrics_tell_what_the_tiers_did(tmp_path: Path) -> None:
    with lone_engine(slot_count=64, memory_budget_bytes=16 << 20, ssd_path=str(tmp_path)) as engine:
        families = {family.name: family for family in ShardMetrics(engine, 0).collect()}
    assert families["sparserow_ps_tier_misses"].samples[0].value == 0
    assert families["sparserow_ps_ssd_file_bytes"].samples[0].labels == {"shard": "0"}
    assert "sparserow_ps_table_ssd_rows" in families


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ssd_path": "/nowhere"}, "memory_budget"),
        ({"ssd_path": "/nowhere", "memory_budget": "1MiB"}, "at least 16777216"),
        ({"ssd_bytes": "1GiB"}, "ssd_bytes has no effect without ssd_path"),
        ({"ssd_engine": "rocksdb"}, "ssd_engine has no effect without ssd_path"),
        ({"ssd_path": "/nowhere", "memory_budget": BUDGET, "ssd_engine": "leveldb"}, "ssd_engine"),
        ({"ssd_direct_io": True}, "ssd_direct_io has no effect without ssd_path"),
        (
            {"ssd_path": "/nowhere", "memory_budget": BUDGET, "ssd_engine": "rocksdb", "ssd_direct_io": True},
            "ssd_direct_io: true is not allowed with ssd_engine rocksdb",
        ),
        ({"ssd_path": "/nowhere", "memory_budget": BUDGET, "ssd_bytes": "1MiB"}, "ssd_bytes"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said), local_cluster(shards=1, **options):
        pass


def refusal(launcher: Launcher, path: Path, *more: str) -> str:
    process = launcher.start("up", "--shards=1", "--port=0", "--memory-budget=16MiB", f"--ssd-path={path}", *more)
    assert process.end() == 1
    return process.err


def test_a_folder_that_cannot_be_used_is_one_line(launcher: Launcher, tmp_path: Path) -> None:
    assert "is not a folder; create it" in refusal(launcher, tmp_path / "missing")
    (tmp_path / "shard-0").mkdir()
    (tmp_path / "shard-0" / "thesis.txt").write_text("mine")
    assert "holds thesis.txt" in refusal(launcher, tmp_path)
    (tmp_path / "shard-0" / "thesis.txt").unlink()
    (tmp_path / "shard-0" / "SPARSEROW").write_text("format 2\nhash 1\ncluster 5\nshard 0\n")
    said = refusal(launcher, tmp_path)
    assert "'cluster 5'" in said
    assert "remove it if its rows are not needed" in said
    (tmp_path / "shard-0" / "SPARSEROW").write_text("format 9\nhash 1\ncluster 5\nshard 0\n")
    assert "'format 9'" in refusal(launcher, tmp_path)


def test_a_file_system_without_direct_io_is_refused_by_name(launcher: Launcher, tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "disk", kind="ramfs") as folder:
        said = refusal(launcher, folder, "--ssd-direct-io")
        assert re.search(r"ssd_direct_io: true is not allowed, since the file system of .* has no direct I/O", said)


@pytest.mark.skipif(_server.has_rocksdb(), reason="this build has RocksDB")
def test_a_build_without_rocksdb_says_what_to_install(launcher: Launcher, tmp_path: Path) -> None:
    said = refusal(launcher, tmp_path, "--ssd-engine", "rocksdb")
    assert "install librocksdb-dev and build again, or take pages" in said


def test_a_read_only_folder_is_one_line(launcher: Launcher, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        assert "cannot be written" in refusal(launcher, tmp_path)
        return
    with mounted_disk(tmp_path / "disk", 1) as folder:  # root may write everywhere else
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        assert "cannot be written" in refusal(launcher, folder)


def corrupt(folder: Path) -> int:
    """Writes over the middle of every file of rows; returns how many there were."""
    files = [*folder.rglob("*.blob"), *folder.rglob("rows/pages")]
    for path in files:
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 4)
            file.write(b"\xa5" * (path.stat().st_size // 2))
    return len(files)


def pull_all(table: KeyedRows, keys: np.ndarray) -> np.ndarray:
    return np.concatenate([table.pull(part) for part in np.array_split(keys, 40)])


def test_damage_makes_a_table_refuse_until_it_is_restored(tmp_path: Path, ssd_engine: str) -> None:
    disk, saved, rows = tmp_path / "disk", str(tmp_path / "saved"), np.arange(160_000)
    disk.mkdir()
    with local_cluster(shards=1, memory_budget=BUDGET, ssd_path=disk, ssd_engine=ssd_engine) as cluster:
        with sr.connect(cluster.address, namespace="n") as session:
            hurt, well = (
                session.create_table(name, dim=DIM, optimizer=sr.optim.Adagrad(lr=0.1)) for name in ("hurt", "well")
            )
            for part in np.array_split(rows, 40):
                hurt.push(part, np.ones((len(part), DIM), np.float32))
            well.push(rows[:100], np.ones((100, DIM), np.float32))
            before = pull_all(hurt, rows)
        with pytest.raises(SystemExit) as ended:
            main(["checkpoint", "save", saved, "--coordinator", cluster.address])
        assert ended.value.code == 0
        with sr.connect(cluster.address, namespace="n") as session:
            hurt, well = session.table("hurt"), session.table("well")
            well.pull(rows[:100])  # rows that were pushed once are the first to leave memory
            assert corrupt(disk) > 0
            said = r"table n/hurt: .*; this shard refuses the table; drop it, and make it anew from a checkpoint"
            with pytest.raises(sr.errors.DataLoss, match=said):
                pull_all(hurt, rows)
            with pytest.raises(sr.errors.DataLoss, match=said):
                hurt.push(rows[:1], np.ones((1, DIM), np.float32))
            np.testing.assert_array_equal(well.pull(rows[:100]), np.full((100, DIM), -0.1, np.float32))
        with pytest.raises(SystemExit) as ended:
            main(["checkpoint", "restore", saved, "--yes", "--coordinator", cluster.address])
        assert ended.value.code == 0
        with sr.connect(cluster.address, namespace="n") as session:
            np.testing.assert_array_equal(pull_all(session.table("hurt"), rows), before)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Embedding(100, 4)
        self.big = nn.Embedding(20_000, 512)  # 40 MB, of which a chunk alone is more than the budget


def test_weights_beyond_the_budget_are_carried_to_the_ssd(tmp_path) -> None:
    with (
        sr.local_cluster(shards=1, memory_budget="16MiB", ssd_path=tmp_path) as cluster,
        sr.connect(cluster.address, namespace="wide") as session,
    ):
        model = Wide()
        weight = model.big.weight.detach().clone()
        session.distribute(model, optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
        some = np.arange(0, 20_000, 999)
        np.testing.assert_array_equal(session.table("big").pull(some), weight[some])


def carry_and_die(address: str) -> None:
    """A process that is killed when it has sent a third of a table's weights."""
    assign, calls = KeyedRows.assign, []

    def assign_or_die(self, keys, rows) -> None:
        calls.append(len(keys))
        if len(calls) == 4:  # the mark, and two chunks of three
            os.kill(os.getpid(), signal.SIGKILL)
        assign(self, keys, rows)

    KeyedRows.assign = assign_or_die
    session = sr.connect(address, namespace="killed")
    session.distribute(Wide(), optimizer=sr.optim.SGD(lr=0.1), min_rows=1, exclude=["small"])


def test_a_carry_that_a_kill_ends_is_made_anew(caplog) -> None:
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    with sr.local_cluster(shards=1, worker_lease="3s") as cluster:
        ended = subprocess.run([sys.executable, __file__, cluster.address], env=path, check=False)
        assert ended.returncode == -signal.SIGKILL
        with sr.connect(cluster.address, namespace="killed", job="beside", staleness=None) as other:
            assert 0 < sum(len(keys) for keys, _ in other.table("big").scan()) < 20_000
            with (
                sr.connect(cluster.address, namespace="killed") as session,
                pytest.raises(
                    sr.errors.FailedPrecondition, match=r"killed/big' has a part of its weights alone.* 'beside'"
                ),
            ):
                session.distribute(Wide(), optimizer=sr.optim.SGD(lr=0.1), min_rows=1, exclude=["small"])
        with sr.connect(cluster.address, namespace="killed") as session:
            model = Wide()
            weight = model.big.weight.detach().clone()
            session.distribute(model, optimizer=sr.optim.SGD(lr=0.1), min_rows=1, exclude=["small"])
            assert "table killed/big: a process ended while it sent its weights; they are sent again" in caplog.text
            np.testing.assert_array_equal(session.table("big").pull(np.arange(20_000)), weight)
            assert sum(len(keys) for keys, _ in session.table("big").scan()) == 20_000, "the mark is gone"


def test_a_carry_that_fails_leaves_no_table_for_the_next_try_to_find(caplog) -> None:
    with sr.local_cluster(shards=1, memory_budget="16MiB") as cluster:
        for _ in range(2):
            with sr.connect(cluster.address, namespace="wide") as session:
                model = Wide()
                with pytest.raises(sr.errors.ResourceExhausted, match=r"memory budget of 16\.0 MiB reached"):
                    session.distribute(model, optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
                assert isinstance(model.small, nn.Embedding)
                assert not session.core.catalog.list_tables("wide")
        assert "were there before" not in caplog.text
        with sr.connect(cluster.address, namespace="wide") as session:
            model = Wide()
            weight = model.small.weight.detach().clone()
            session.distribute(model, optimizer=sr.optim.SGD(lr=0.1), min_rows=1, exclude=["big"])
            np.testing.assert_array_equal(session.table("small").pull(np.arange(100)), weight)


if __name__ == "__main__":
    carry_and_die(sys.argv[1])
