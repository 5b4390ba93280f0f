"""A second run in a namespace that has tables: what it says, and how it is refused."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch import nn

import sparserow as sr
from sparserow.proto.control import ControlClient


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with sr.local_cluster(shards=2) as cluster:
        yield cluster.address


class Net(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: nn.Embedding(300, 2) for name in names})
        self.head = nn.Linear(2, 1)


def run(address: str, namespace: str, *names: str, **options: Any) -> sr.Session:
    """Distributes a model, in whose tables 300 rows each are made."""
    session = sr.connect(address, namespace=namespace, **options)
    session.distribute(Net(*names), optimizer=sr.optim.SGD(lr=0.5), min_rows=1)
    return session


def test_distribute_says_which_tables_were_there(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run(address, "said", "user").close()
        assert not caplog.records
        with run(address, "said", "user", "item") as session:
            session.table("tables.user").delete(np.arange(100))
    assert [record.getMessage() for record in caplog.records] == [
        "namespace 'said': 1 of the 2 tables were there before: tables.user (300 rows); training continues with their "
        "rows, and the model's weights are not sent (namespace_policy='new' refuses such tables, 'continue' logs "
        "nothing)"
    ]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        run(address, "said", "user", namespace_policy="continue").close()
        assert not caplog.records
        run(address, "said", *map(str, range(8)), "user", "item").close()
    assert "2 of the 10 tables were there before: tables.user (200 rows), tables.item (300 rows);" in caplog.text


def test_in_process_it_says_so_too(caplog: pytest.LogCaptureFixture) -> None:
    cluster = sr.InProcessCluster()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with cluster.connect("said") as session:
                session.distribute(Net("user"), optimizer=sr.optim.SGD(lr=0.5), min_rows=1)
    assert caplog.text.count("1 of the 1 tables were there before: tables.user (300 rows)") == 1


def test_new_is_refused_where_there_are_tables(address: str) -> None:
    run(address, "fresh", "user", namespace_policy="new").close()
    words = r"namespace 'fresh': namespace_policy is 'new', and it has 1 tables: tables.user \(300 rows\); drop them"
    with pytest.raises(sr.errors.FailedPrecondition, match=words):
        run(address, "fresh", "user", namespace_policy="new")
    with ControlClient(address) as control:
        assert not [job for job in control.status().jobs if job.members]
        control.drop_table("fresh", "tables.user")
    run(address, "fresh", "user", namespace_policy="new").close()
    run(address, "fresh", "user").close()


def test_all_ranks_are_judged_as_the_first_one(address: str) -> None:
    """A table that rank 0 makes as soon as it is in does not refuse the others; one that joins later passes."""
    sessions: dict[int, sr.Session] = {}

    def come(rank: int, world_size: int = 3) -> None:
        options = {"rank": rank, "world_size": world_size, "staleness": 4, "namespace_policy": "new"}
        sessions[rank] = sr.connect(address, namespace="ranks", **options)
        sessions[rank].create_table(f"of_{rank}", dim=2, optimizer=sr.optim.SGD(lr=1.0))

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(sessions) == [0, 1, 2]
    come(3, world_size=4)
    assert sessions[3].table("of_0").pull([1]).shape == (1, 2)
    for session in sessions.values():
        session.close()
    with pytest.raises(sr.errors.FailedPrecondition, match="it has 4 tables: of_0"):
        come(0, world_size=1)


def test_a_policy_that_does_not_exist_is_refused(address: str) -> None:
    with pytest.raises(
        sr.errors.InvalidArgument, match="namespace_policy: 'old' is not allowed; allowed: new, continue, None"
    ):
        sr.connect(address, namespace_policy="old")


def test_a_coordinator_of_the_version_before_cannot_judge(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    register = ControlClient.register_worker

    def of_the_version_before(self: ControlClient, **arguments: Any) -> Any:
        return replace(register(self, **arguments), found=None)

    monkeypatch.setattr(ControlClient, "register_worker", of_the_version_before)
    run(address, "before", "user").close()
    run(address, "before", "user").close()
    with pytest.raises(sr.errors.FailedPrecondition, match="version does not support 'new'"):
        sr.connect(address, namespace="other", namespace_policy="new")
    with ControlClient(address) as control:
        assert not [job for job in control.status().jobs if job.members]
