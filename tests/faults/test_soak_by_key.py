"""Threads that push by key while shards are killed at random: each push is in the rows, or counted as lost, once.

SPARSEROW_TEST_FULL=1 kills six times; SPARSEROW_TEST_SEED=N repeats a run's pauses.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import numpy as np
import pytest

import sparserow as sr
from long_form import FULL
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import SparserowError
from sparserow_process import wait_until

pytestmark = pytest.mark.started

KILLS = 6 if FULL else 2  # a shard that ends four times within a minute ends its cluster
THREADS = 4
DIM = 2
KEYS = np.arange(64, dtype=np.uint64)  # on both shards
ONES = np.ones((len(KEYS), DIM), np.float32)


class Pusher:
    """Pushes ones until it is told to stop, and counts how each push ended. Thread-safe."""

    def __init__(self, table: sr.TableRows) -> None:
        self.acknowledged = self.in_doubt = 0
        self.refused: list[str] = []
        self._table = table
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def push(self) -> None:
        try:
            self._table.push(KEYS, -ONES)
        except SparserowError as error:
            with self._lock:
                if error.may_be_applied:
                    self.in_doubt += 1
                else:
                    self.refused.append(str(error))
        else:
            with self._lock:
                self.acknowledged += 1

    def _run(self) -> None:
        while not self._is_over.is_set():
            self.push()

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()


def test_each_push_is_in_the_rows_or_counted_as_lost(tmp_path, monkeypatch):
    seed = int(os.environ.get("SPARSEROW_TEST_SEED", random.SystemRandom().randrange(2**32)))
    print(f"seed {seed}")
    pauses = random.Random(seed)
    monkeypatch.setattr("sparserow.worker.api.connect.REPLAY_BYTES", 4096)  # so that some are lost
    with (
        sr.local_cluster(shards=2, slot_count=64) as cluster,
        sr.connect(cluster.address, "soak", staleness=None, deadline_sec=60) as session,
        ControlClient(cluster.address) as control,
    ):
        table = session.create_table("rows", dim=DIM, optimizer=sr.optim.SGD(lr=1.0), init=sr.Constant(0.0))
        pusher = Pusher(table)
        try:
            session.keep_rows(str(tmp_path), every_sec=2.0)
            wait_until(lambda: control.status().checkpoint, "the first save")
            for kill in range(KILLS):
                time.sleep(pauses.uniform(1.0, 4.0))
                restores = control.status().shards[kill % 2].restores
                os.kill(control.status().shards[kill % 2].pid, signal.SIGKILL)
                wait_until(
                    lambda shard=kill % 2, before=restores: control.status().shards[shard].restores > before,
                    "the shard's return",
                )
        finally:
            pusher.stop()
        pusher.push()  # ends what is in doubt
        applied = table.pull(KEYS)
        shards = control.status().shards
        owner = control.cluster().slot_owner
    sent = pusher.acknowledged + pusher.in_doubt
    lost = [shard.commits_lost for shard in shards]
    print(f"{sent} sent, {pusher.in_doubt} of them in doubt, {len(pusher.refused)} refused, {lost} lost")
    assert len(set(owner)) == 2
    assert pusher.refused == []
    assert sorted(set(applied.ravel().tolist())) == sorted({float(sent - count) for count in lost})
