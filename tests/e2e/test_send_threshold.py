"""``sparserow serve --sync-after-updates/--sync-after-move``: rows that have changed little wait, and not for ever."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import sparserow as sr
from restart_scene import status_of
from sparserow_process import Launcher, wait_until

DIM = 4
KEYS = np.arange(100, dtype=np.uint64)
MARKS = np.arange(1000, 1100, dtype=np.uint64)


@pytest.mark.parametrize("option", ["--sync-after-updates=3", "--sync-after-move=2.5"])
def test_a_row_is_sent_when_it_has_changed_enough(tmp_path: Path, launcher: Launcher, option: str) -> None:
    root = str(tmp_path)
    both = np.concatenate([KEYS, MARKS])
    with sr.local_cluster(shards=2) as cluster, sr.connect(cluster.address, "ads", staleness=None) as session:
        table = session.create_table("user", dim=DIM, optimizer=sr.optim.SGD(lr=0.5))
        table.assign(both, np.zeros((len(both), DIM), np.float32))
        session.publish("ctr", root=root)
        serve = ("serve", f"--root={root}", "--model=ctr", "--port=0", f"--follow={cluster.address}")
        patient = launcher.start(*serve, option, "--sync-max-delay=1h", "--sync-interval=20ms")
        hasty = launcher.start(*serve, option, "--sync-max-delay=200ms", "--sync-interval=20ms", "--replica=1")
        addresses = [process.wait_for(r"ready at gRPC (\S+),")[1] for process in (patient, hasty)]
        with sr.ServingClient(addresses[0]) as first, sr.ServingClient(addresses[1]) as second:

            def push(keys: np.ndarray, times: int, step: float = 1.0) -> None:
                for _ in range(times):
                    table.push(keys, np.full((len(keys), DIM), step, np.float32))  # moves a row by `step` in L2

            def served(client: sr.ServingClient, keys: np.ndarray) -> np.ndarray:
                return client.lookup("user", keys, deadline_ms=10_000).rows

            # Of what was written before a follower came, a shard sends all, however little. A publication has a cursor.
            wait_until(
                lambda: [it.load.followers for it in status_of(cluster.address).shards] == [3, 3],
                "both to follow both shards",
            )
            # A shard that measures moves must have sent a row once to know what the follower has, and does so at once:
            # whenever it looks, each of these is enough.
            push(both, 3, step=3.0)
            wait_until(lambda: (served(first, both) == -4.5).all(), "what changed enough")
            push(KEYS, 2)
            push(MARKS, 3)
            wait_until(lambda: (served(first, MARKS) == -6.0).all(), "the marks, which changed enough")
            assert (served(first, KEYS) == -4.5).all()  # wait, although their slots were read since
            wait_until(lambda: (served(second, both) == table.pull(both)).all(), "what has waited long enough")
            push(KEYS, 1)
            wait_until(lambda: (served(first, KEYS) == -6.0).all(), "what has changed enough by now")
            np.testing.assert_array_equal(served(first, both), table.pull(both))
