"""Policies of tables on real shards: refused keys, sweeps by command and by themselves, and what is told of them."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import sparserow as sr
from shard_engine import lone_engine
from sparserow.cpp_ext import _client
from sparserow.deploy.cli import main
from sparserow.deploy.launch.local_cluster import LocalCluster, local_cluster
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import FailedPrecondition, ResourceExhausted
from sparserow.proto.schema import TableSchema
from sparserow.proto.status.table_view import table_views
from sparserow.ps_server.shard.metrics import ShardMetrics
from sparserow_process import wait_until

DIM = 8


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code or 0


def rows_of(cluster: LocalCluster) -> dict[str, int]:
    with ControlClient(cluster.address) as control:
        reply = control.status()
    names = [schema.name for schema in reply.tables]
    return {
        name: sum(usage.rows for shard in reply.shards for usage in shard.tables if usage.name == f"n/{name}")
        for name in names
    }


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = torch.nn.Embedding(1000, DIM)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.user(ids).sum()


def test_a_model_trains_the_keys_that_come_often(capsys: pytest.CaptureFixture[str]) -> None:
    with local_cluster(shards=1, sweep_every=None) as cluster:
        session = sr.connect(cluster.address, namespace="n")
        model = session.distribute(
            Net(),
            optimizer=sr.optim.SGD(lr=1.0),
            min_rows=1,
            carry_weights=False,
            tables={"user": sr.Table(init=sr.Constant(1.0), admit_after=2, evict_after_steps=3)},
        )
        steps = [[1, 1, 2, 3], [2, 4], [1, 2, 2], [5], [6], [2]]
        for ids in steps:
            model(torch.tensor(ids)).backward()
            assert session.step()
        table = session.table("user")
        weights = table.pull(np.arange(7))[:, 0]
        # Each key's second push and later ones count; a step pushes a key once, its gradients summed.
        np.testing.assert_array_equal(weights, [1, 0, -3, 1, 1, 1, 1])
        assert rows_of(cluster) == {"user": 2}
        with pytest.raises(FailedPrecondition, match=r"policy\.evict_after_steps 3, the request says 0"):
            session.create_table(
                "user", dim=DIM, optimizer=sr.optim.SGD(), init=sr.Constant(1.0), policy=sr.RowPolicy(2)
            )
        assert run("table", "sweep", "n/user", "--dry-run", "--coordinator", cluster.address) == 0
        assert "n/user: would remove 1 of 2 rows, 36 B" in capsys.readouterr().out
        assert run("table", "sweep", "--coordinator", cluster.address) == 0
        said = capsys.readouterr().out
        assert "n/user: removed 1 of 2 rows, 36 B" in said
        assert "older than evict_after_steps: 1 rows" in said
        np.testing.assert_array_equal(table.pull(np.arange(3))[:, 0], [1, 1, -3])
        assert run("status", "--coordinator", cluster.address) == 0
        shown = capsys.readouterr().out
        assert "refused" in shown
        assert "swept" in shown
        assert "age p50/p99" in shown
        assert run("table", "sweep", "n/users", "--coordinator", cluster.address) == 1
        assert "did you mean n/user?" in capsys.readouterr().err
        session.create_table("plain", dim=DIM, optimizer=sr.optim.SGD())
        assert run("table", "sweep", "n/plain", "--coordinator", cluster.address) == 1
        assert "its policy removes no rows" in capsys.readouterr().err
        session.close()


def test_a_bound_is_of_the_whole_table_and_kept_in_the_background() -> None:
    with local_cluster(shards=3, sweep_every=0.1) as cluster, sr.connect(cluster.address, namespace="n") as session:
        policy = sr.RowPolicy(max_rows=3000, evict_by="lfu")
        table = session.create_table("t", dim=DIM, optimizer=sr.optim.Adagrad(lr=0.1), policy=policy)
        ones = np.ones((12_000, DIM), np.float32)
        for _ in range(3):  # first, and fewer than the bound: a sweep between two pushes removes none of them
            table.push(np.arange(2000), ones[:2000])
        table.push(np.arange(12_000), ones)
        wait_until(lambda: rows_of(cluster)["t"] <= 3003, "the sweeps")
        assert 2990 <= rows_of(cluster)["t"] <= 3003  # the shards' parts are rounded up
        before = table.pull(np.arange(2000))
        table.push(np.arange(2000), ones[:2000])
        moved = before - table.pull(np.arange(2000))
        # The 2,000 keys that were pushed most are still there with their sums, but for those beyond a shard's part.
        assert (moved < 0.06).all(axis=1).mean() > 0.9


def test_a_sweep_reaches_rows_on_the_ssd(tmp_path) -> None:
    rows = 60_000
    with (
        local_cluster(shards=1, memory_budget="16MiB", ssd_path=tmp_path, sweep_every=None) as cluster,
        sr.connect(cluster.address, namespace="n") as session,
        ControlClient(cluster.address) as control,
    ):
        table = session.create_table(
            "t", dim=32, optimizer=sr.optim.Adagrad(lr=0.1), policy=sr.RowPolicy(evict_below_norm=3.0)
        )
        for part in np.array_split(np.arange(rows), 20):
            table.assign(part, np.where(part[:, None] % 3 == 0, 0.1, 1.0).astype(np.float32).repeat(32, axis=1))
        usage = control.status().shards[0].tables[0]
        assert usage.ssd_rows > rows // 20
        planned = control.sweep_table("n", "t", dry_run=True)
        done = control.sweep_table("n", "t")
        assert [freed.rows for freed in planned.freed] == [freed.rows for freed in done.freed] == [0, 0, rows // 3, 0]
        assert done.rows_seen == rows
        assert done.complete
        assert sum(len(page[0]) for page in table.scan()) == rows - rows // 3
        assert control.status().shards[0].tables[0].rows == rows - rows // 3


def test_metrics_tell_of_refused_keys_and_swept_rows() -> None:
    schema = TableSchema("n", "t", DIM, sr.optim.SGD(lr=1.0), policy=sr.RowPolicy(admit_after=2, max_rows=10), id=5)
    with lone_engine(slot_count=64) as engine:
        engine.create_tables([schema])
        client = _client.Client(
            shards=[("127.0.0.1", engine.port)], slot_owner=np.zeros(64, np.uint16), cluster_id=1, route_epoch=0
        )
        keys, rows = np.arange(100, dtype=np.uint64), np.ones((100, DIM), np.float32)
        client.assign(5, keys, rows, dim=DIM)
        engine.sweeps.sweep_all()
        families = {family.name: family for family in ShardMetrics(engine, 0).collect()}
    swept = {sample.labels["rule"]: sample.value for sample in families["sparserow_ps_table_swept_rows"].samples}
    assert swept == {"steps": 0, "seconds": 0, "norm": 0, "bound": 90}
    for name in ("refused_pushes", "filter_keys", "filter_bytes", "filter_error_rate"):
        assert families[f"sparserow_ps_table_{name}"].samples[0].labels == {"shard": "0", "table": "n/t"}
    assert families["sparserow_ps_table_sweep_longest_hold_seconds"].samples[0].value > 0


def test_counts_and_ages_go_on_after_a_restore(tmp_path) -> None:
    tables = {"user": sr.Table(init=sr.Constant(1.0), admit_after=3, evict_after_steps=4)}

    def train(cluster: LocalCluster, steps: list[list[int]]) -> sr.Session:
        session = sr.connect(cluster.address, namespace="n")
        model = session.distribute(
            Net(), optimizer=sr.optim.SGD(lr=1.0), min_rows=1, carry_weights=False, tables=tables
        )
        for ids in steps:
            model(torch.tensor(ids)).backward()
            assert session.step()
        return session

    saved = str(tmp_path / "saved")
    with local_cluster(shards=2, sweep_every=None) as cluster:
        # 1 has its row from the third step on; 2 and 3 are counted twice, 4 once.
        train(cluster, [[1], [1], [1, 2, 3], [2, 3, 4], [9]]).close()
        assert rows_of(cluster) == {"user": 1}
        assert run("checkpoint", "save", saved, "--coordinator", cluster.address) == 0
    with local_cluster(shards=1, sweep_every=None) as cluster:
        assert run("checkpoint", "restore", saved, "--yes", "--coordinator", cluster.address) == 0
        with ControlClient(cluster.address) as control:
            assert control.status().shards[0].tables[0].filter_entries == 4  # 2, 3, 4 and 9
        session = train(cluster, [[2, 4], [9]])
        np.testing.assert_array_equal(session.table("user").pull(np.arange(5))[:, 0], [1, 0, 0, 1, 1])
        assert rows_of(cluster) == {"user": 2}
        session.close()
        assert run("table", "sweep", "--coordinator", cluster.address) == 0
        with ControlClient(cluster.address) as control:
            # 1 was pushed two steps before the save and not in the two after it; 2 was.
            status = control.status()
        assert list(status.shards[0].tables[0].swept_rows) == [1, 0, 0, 0]
        (table,) = table_views(status)
        assert table.ages_steps is not None
        assert table.ages_steps.rows == table.rows == 1
        assert (table.added, table.evicted, table.ages_seconds) == (2, 0, None)


def test_a_worker_joins_while_many_sweeps_are_asked_for() -> None:
    asked = 40
    with local_cluster(shards=1, sweep_every=None) as cluster, sr.connect(cluster.address, namespace="n") as session:
        policy = sr.RowPolicy(evict_after_steps=1000)
        table = session.create_table("t", dim=1, optimizer=sr.optim.SGD(), policy=policy)
        for first in range(0, 3_000_000, 500_000):
            keys = np.arange(first, first + 500_000, dtype=np.uint64)
            table.push(keys, np.ones((len(keys), 1), np.float32))

        def sweep(_: int) -> str:
            with ControlClient(cluster.address) as control:
                try:
                    control.sweep_table("n", "t")
                except ResourceExhausted as error:
                    return str(error)
            return "swept"

        with ThreadPoolExecutor(asked) as threads:
            ends = threads.map(sweep, range(asked))
            sr.connect(cluster.address, namespace="n", job="other", staleness=None).close()
            outcomes = Counter(ends)
        with ControlClient(cluster.address) as control:
            assert control.status().ready
    refusal = "shard 0: a sweep is running, and one runs at a time; try again when it has ended"
    assert set(outcomes) <= {"swept", refusal}
    assert outcomes["swept"] >= 1
