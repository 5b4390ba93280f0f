"""A worker of a job with a quorum, as a process of its own that may be slow, or be killed.

    python quorum_worker.py COORDINATOR RANK WORLD_SIZE QUORUM STEPS PAUSE_MS CACHE_BYTES HOLD DIE_AT

In each step it adds a gradient of 1 to rows of its own, by rank and step, to the last row, and to every dense weight;
rates are 1 and rows begin at 0. So a row says whether its worker was a member of the step, and the last row and the
weights how many steps there were. A worker that was a member fails unless it saw exactly the steps before.

It pauses in each step. In its first one it waits until the others are HOLD steps ahead; 0: it does not. In the first
step that it begins from DIE_AT on it is killed while it commits; -1: never.

It prints "ready", waits for a line on its standard input, and at the end prints the steps that it was a member of, and
its counters, as one line of JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from dataclasses import asdict

import torch
from torch import nn

import sparserow as sr
from sparserow.proto.control import ControlClient

KEYS_A_STEP = 16
SIDE = 24  # of the dense weights


class Net(nn.Module):
    """A table for the traces of the workers, and weights that all change.

    Attributes:
        seen: the values of the last row and of the weights in the last forward.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.seen: set[float] = set()
        self.trace = nn.Embedding(rows, 1)
        self.dense = nn.Parameter(torch.zeros(SIDE, SIDE))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all that the step reads."""
        rows = self.trace(ids)
        self.seen = {*rows[-1].tolist(), *self.dense.flatten().tolist()}
        total: torch.Tensor = rows.sum() + self.dense.sum()
        return total


def keys_of(rank: int, step: int, steps: int) -> range:
    """The rows that only this worker changes, in this step alone."""
    begin = (rank * steps + step) * KEYS_A_STEP
    return range(begin, begin + KEYS_A_STEP)


def wait_for_step(coordinator: str, step: int) -> None:
    """Returns when a worker of the job has committed a step; fails after two minutes."""
    deadline = time.monotonic() + 120
    with ControlClient(coordinator) as control:
        while max(job.highest_step for job in control.status().jobs if job.name == "quorum") < step:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def die_soon() -> None:
    """Kills this process within the next milliseconds, which a commit takes as well."""
    time.sleep(random.SystemRandom().uniform(0.0, 0.005))
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Takes steps until the job's clock is at its end."""
    torch.set_num_threads(1)
    coordinator, rank, world, quorum, steps, pause_ms, cache_bytes, hold, die_at = sys.argv[1], *map(int, sys.argv[2:])
    cache = sr.RowCache(bytes=cache_bytes) if cache_bytes else None
    last = world * steps * KEYS_A_STEP
    with sr.connect(coordinator, "quorum", rank=rank, world_size=world, quorum=quorum, cache=cache) as session:
        net = Net(last + 1)
        tables = {"trace": sr.Table(init=sr.Constant(0.0))}
        model = session.distribute(net, optimizer=sr.optim.SGD(lr=1.0), min_rows=100, tables=tables)
        session.dense_on_servers(model, optimizer=sr.optim.SGD(lr=1.0))
        print("ready", flush=True)
        sys.stdin.readline()
        taken = []
        while (step := session.current_step) < steps:
            loss = model(torch.tensor([*keys_of(rank, step, steps), last]))
            time.sleep(pause_ms / 1000)
            loss.backward()
            if hold and step == 0:
                wait_for_step(coordinator, hold)
            if 0 <= die_at <= step:
                threading.Thread(target=die_soon).start()
            if session.step():
                assert model.seen == {-float(step)}, (step, model.seen)
                taken.append(step)
        print(json.dumps({"taken": taken, "stats": asdict(session.stats())}), flush=True)


if __name__ == "__main__":
    main()
