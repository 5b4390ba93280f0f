"""Replicas: a lookup is whole although one of two processes is dead or stopped, whichever it is."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import sparserow as sr
from sparserow_process import wait_until

KEYS = np.arange(200, dtype=np.uint64)


@pytest.mark.started
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("hedge_ms", [20, None])
def test_a_lookup_does_without_one_replica(tmp_path: Path, number: signal.Signals, hedge_ms: float | None) -> None:
    root = str(tmp_path)
    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, "ads", staleness=None) as session:
        rows = np.random.default_rng(1).standard_normal((len(KEYS), 4)).astype(np.float32)
        session.create_table("user", dim=4, optimizer=sr.optim.SGD()).assign(KEYS, rows)
        session.publish("ctr", root=root)
    for gone in (0, 1):
        with (
            sr.local_serving("ctr", root=root, replicas=2) as serving,
            sr.ServingClient(serving.addresses, hedge_ms=hedge_ms, refresh_sec=600) as client,
        ):
            os.kill(serving.pids[gone], number)
            for _ in range(5):
                answer = client.lookup("user", KEYS, deadline_ms=2000)
                assert not answer.is_partial
                np.testing.assert_array_equal(answer.rows, rows)
            if number == signal.SIGSTOP:
                os.kill(serving.pids[gone], signal.SIGCONT)


def test_processes_that_are_started_alike_follow_each_for_itself() -> None:
    """As the pods of a Deployment are: none of them knows which replica it is."""
    with (
        sr.local_cluster(shards=1) as cluster,
        sr.connect(cluster.address, "ads", staleness=None) as session,
    ):
        table = session.create_table("user", dim=4, optimizer=sr.optim.SGD())
        alike = {"follow": cluster.address, "namespace": "ads", "sync_interval": "20ms"}
        with (
            sr.local_serving("ctr", **alike) as one,
            sr.local_serving("ctr", **alike) as two,
            sr.ServingClient(one.addresses) as first,
            sr.ServingClient(two.addresses) as second,
        ):
            for turn in range(30):
                keys = np.arange(turn * 50, turn * 50 + 50, dtype=np.uint64)
                table.assign(keys, np.full((50, 4), turn, np.float32))
                time.sleep(0.05)
            all_keys = np.arange(1500, dtype=np.uint64)
            for client in (first, second):
                wait_until(lambda c=client: c.lookup("user", all_keys).found.all(), "rows of every turn")
