r"""``bench staleness``: what a bound buys against stragglers.

Two workers, dense tensors on the servers; each sleeps, by itself, 100 ms before a step with probability 0.1.

The analytic bound leaves all but the sleeps out of account. Let worker i start step t at :math:`S_i(t)` and end it at
:math:`E_i(t) = S_i(t) + c + X_i(t)`, where c is the time of a step without a sleep and X is D with probability p, else
0. With bound k a worker waits for the other's step t-1-k:

.. math:: S_i(t) = \max(E_i(t-1), E_j(t-1-k))

* sync (k = 0): both wait for each other in every step, so a step takes :math:`c + D (1 - (1-p)^2)`.
* async: no worker waits: :math:`c + D p`, less what the slower of the two loses by chance over so few steps.
* in between there is no closed form: the recursion is run on the very sleeps that the workers drew.

A quorum buys the same against stragglers with a worker more: steps of the first two of three workers (train.quorum),
which have as many gradients as those of two workers in sync. The one that is left over drops its step when it is done
with it, and goes on with the next open one; this recursion is run as well.

Hence async is at most :math:`(c + D(2p - p^2)) / (c + D p)` times as fast as sync: 2 - p = 1.9 for D much above c. All
modes have the same sleeps (a seed per worker), so they differ in nothing but the bound, or the third worker.
"""

from __future__ import annotations

import heapq
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ...proto.errors import Internal
from ...proto.optim import SGD, Adagrad
from ...worker.api.connect import connect
from ..launch.local_cluster import local_cluster
from .harness import Figure

WORKERS = 2
BACKUPS = 1  # workers more, of the job with a quorum of WORKERS
MODES: tuple[int | None, ...] = (0, 1, 4, None)
LIMIT_OF_SYNC = 1.2  # least speed of k = 4 relative to sync
PROBABILITY = 0.1
ROWS, DIM, BATCH = 1_000, 16, 64
_START_SEC = 120.0
_RUN_SEC = 300.0


@dataclass(frozen=True)
class Size:
    """The steps of each worker, and the length of a sleep in seconds."""

    steps: int
    sleep_sec: float


FULL = Size(steps=300, sleep_sec=0.1)
QUICK = Size(steps=20, sleep_sec=0.01)


def sleeps_of(rank: int, size: Size) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Returns (steps) the seconds that a worker sleeps before each step; they are the same in every mode."""
    return np.where(np.random.default_rng(31 + rank).random(size.steps) < PROBABILITY, size.sleep_sec, 0.0)


def ideal_sec(staleness: int | None, size: Size, step_sec: float) -> float:
    """Returns the seconds until the last worker has ended, by the recursion in the docstring of the module."""
    ends = np.zeros((size.steps + 1, WORKERS))  # row t: the times at which the workers ended step t-1
    sleeps = [sleeps_of(rank, size) for rank in range(WORKERS)]
    for step in range(size.steps):
        others = ends[step - staleness].max() if staleness is not None and step >= staleness else 0.0
        for rank in range(WORKERS):
            ends[step + 1, rank] = max(ends[step, rank], others) + step_sec + sleeps[rank][step]
    return float(ends[-1].max())


def ideal_quorum_sec(size: Size, step_sec: float) -> float:
    """Returns the seconds until the last of all workers has ended, where a step has the first WORKERS as its members.

    A member waits until its step is full; who is done with a step that is full begins the open one at once.
    """
    sleeps = [sleeps_of(rank, size) for rank in range(WORKERS + BACKUPS)]
    open_step, members, now = 0, [], 0.0
    working = [(step_sec + sleep[0], rank, 0) for rank, sleep in enumerate(sleeps)]  # (end, rank, step)
    heapq.heapify(working)
    while working:
        now, rank, step = heapq.heappop(working)
        begins = [rank]
        if step == open_step:
            members.append(rank)
            begins = []
        if len(members) == WORKERS:
            open_step, begins, members = open_step + 1, members, []
        if open_step < size.steps:
            for each in begins:
                heapq.heappush(working, (now + step_sec + sleeps[each][open_step], each, open_step))
    return now


def run_staleness(size: Size) -> list[Figure]:
    """Returns all figures; see the docstring of the module."""
    with local_cluster(shards=2) as cluster, _team(cluster.address) as everyone:
        team = everyone[:WORKERS]
        _run(team, "warm-up", 0, Size(20, 0.0))
        step_sec = _run(team, "plain", 0, Size(size.steps, 0.0)) / size.steps
        seconds = {mode: _run(team, f"mode-{mode}", mode, size) for mode in MODES}
        _run(everyone, "warm-up-quorum", 0, Size(20, 0.0), WORKERS)
        quorum_step_sec = _run(everyone, "plain-quorum", 0, Size(size.steps, 0.0), WORKERS) / size.steps
        quorum_sec = _run(everyone, "mode-quorum", 0, size, WORKERS)
    figures = [Figure("staleness: a step without a sleep", step_sec * 1000, "ms", higher_is_better=False)]
    for mode, took in seconds.items():
        name = {0: "sync", None: "async"}.get(mode, f"k={mode}")
        limit = LIMIT_OF_SYNC if mode == 4 else None
        ratio = seconds[0] / took
        rate = WORKERS * size.steps / took
        figures.append(Figure(f"staleness {name}: steps of both workers, of sync", rate, "steps/s", limit, ratio))
        ideal = ideal_sec(mode, size, step_sec)
        figures.append(
            Figure(
                f"staleness {name}: analytic bound, of sync's",
                WORKERS * size.steps / ideal,
                "steps/s",
                None,
                ideal_sec(0, size, step_sec) / ideal,
            )
        )
    name = f"staleness quorum {WORKERS} of {WORKERS + BACKUPS}"
    steps, sync = WORKERS * size.steps, ideal_sec(0, size, step_sec)
    ideal = ideal_quorum_sec(size, quorum_step_sec)
    return [
        *figures,
        Figure(f"{name}: steps of two workers, of sync", steps / quorum_sec, "steps/s", None, seconds[0] / quorum_sec),
        Figure(f"{name}: analytic bound, of sync's", steps / ideal, "steps/s", None, sync / ideal),
    ]


Team = Sequence["subprocess.Popen[str]"]


@contextmanager
def _team(address: str) -> Iterator[Team]:
    """Runs the workers, which end with the block."""
    team = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, address, str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORKERS + BACKUPS)
    ]
    try:
        yield team
    finally:
        for worker in team:
            worker.kill()
            worker.communicate()


def _run(team: Team, namespace: str, staleness: int | None, size: Size, quorum: int | None = None) -> float:
    """Returns the seconds from the common start to the end of the last worker."""
    _send_all(team, json.dumps([namespace, len(team), staleness, quorum, size.steps, size.sleep_sec]))
    _hear_all(team, "ready", _START_SEC)
    _send_all(team, "go")
    began = time.perf_counter()
    _hear_all(team, "done", _RUN_SEC)
    return time.perf_counter() - began


def _send_all(team: Team, word: str) -> None:
    for worker in team:
        assert worker.stdin is not None
        worker.stdin.write(word + "\n")
        worker.stdin.flush()


def _hear_all(team: Team, word: str, deadline_sec: float) -> None:
    """Returns when every worker has said ``word``; a worker that ends or is late ends the benchmark."""
    late = threading.Timer(deadline_sec, _kill, [team])
    late.start()
    try:
        for rank, worker in enumerate(team):
            assert worker.stdout is not None
            if worker.stdout.readline().strip() != word:
                raise Internal(f"bench staleness: worker {rank} did not say {word!r} within {deadline_sec:g} s")
    finally:
        late.cancel()


def _kill(team: Team) -> None:
    for worker in team:
        worker.kill()


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM)
        self.tower = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.tower(self.table(ids)).squeeze(1)
        return out


def _work(address: str, rank: int) -> None:
    """Makes the runs of one worker in a process of its own, one for each line that it reads, until there is none."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        namespace, world, staleness, quorum, steps, sleep_sec = json.loads(line)
        torch.manual_seed(0)
        with connect(address, namespace, rank=rank, world_size=world, staleness=staleness, quorum=quorum) as session:
            model = session.distribute(_Net(), optimizer=Adagrad(lr=0.05), min_rows=100)
            session.dense_on_servers(model, optimizer=SGD(lr=0.01))
            random = torch.Generator().manual_seed(rank)
            print("ready", flush=True)
            sys.stdin.readline()
            sleeps = sleeps_of(rank, Size(steps, sleep_sec))
            while session.current_step < steps:
                time.sleep(sleeps[session.current_step])
                ids = torch.randint(0, ROWS, (BATCH,), generator=random)
                nn.functional.binary_cross_entropy_with_logits(model(ids), (ids % 2).float()).backward()
                session.step()
            session.flush()
            print("done", flush=True)


if __name__ == "__main__":
    _work(sys.argv[1], int(sys.argv[2]))
