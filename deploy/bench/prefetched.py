"""The part of ``bench train`` with ``session.prefetch``, against torch and against no prefetch.

A pipeline works ahead, so contenders cannot take turns step by step: the background work of one would fall into the
time of another. They take turns in blocks. A block is a new pass over the same batches, which are made beforehand. Its
first steps, for which nothing was prefetched, are not measured. A figure is the median over blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from torch import Tensor

from ...worker.api.connect import connect
from ...worker.api.session import Session
from ..launch.local_cluster import local_cluster
from .click_model import CpuClock, Size, ZipfBatches, distributed_step, torch_step
from .harness import Figure, median, process_cpu

DEPTH = 2
LIMIT_OF_TORCH = 1.15
_BLOCKS = 5
_DROPPED = DEPTH + 2

Batch: TypeAlias = tuple[Tensor, Tensor]


@dataclass
class _Runner:
    """One contender.

    Args:
        step: makes a training step.
        feed: makes a pass over batches.
        server: returns the CPU seconds of the shard.
    """

    step: Callable[[Batch], None]
    feed: Callable[[list[Batch]], Iterable[Batch]]
    server: Callable[[], float]
    seconds: list[float] = field(default_factory=list)  # seconds of a step, by block
    worker_cpu: CpuClock = field(default_factory=lambda: CpuClock(time.process_time))

    def __post_init__(self) -> None:
        self.server_cpu = CpuClock(self.server)

    def run(self, batches: list[Batch]) -> None:
        """Runs one block."""
        began = 0.0
        for number, batch in enumerate(self.feed(batches)):
            if number == _DROPPED:
                self.worker_cpu.start()
                self.server_cpu.start()
                began = time.perf_counter()
            self.step(batch)
        self.seconds.append((time.perf_counter() - began) / (len(batches) - _DROPPED))
        self.worker_cpu.stop()
        self.server_cpu.stop()

    def forget(self) -> None:
        """Drops the measurements so far, which were a warm-up."""
        for measured in (self.seconds, self.worker_cpu.seconds, self.server_cpu.seconds):
            measured.clear()


def measure_prefetch(size: Size, hot: int) -> list[Figure]:
    """Returns rates with prefetch relative to torch, CPU per step, and how much is sent again and why."""
    source = ZipfBatches(size, hot)
    measured = max(size.repetitions // _BLOCKS, 2)
    batches = [source.make() for _ in range(measured + _DROPPED)]
    with ExitStack() as stack:
        cluster = stack.enter_context(local_cluster(shards=1))

        def joined(name: str) -> Session:
            return stack.enter_context(connect(cluster.address, f"{name}-{hot}"))

        def server_cpu() -> float:
            return process_cpu(cluster.shard_pids[0])

        def ahead(session: Session) -> _Runner:
            step = distributed_step(size, session)
            return _Runner(step, lambda given: session.prefetch(given, depth=DEPTH), server_cpu)

        session = joined("ahead")
        runners = {
            "torch": _Runner(torch_step(size), lambda given: given, server_cpu),
            "without": _Runner(distributed_step(size, joined("without")), lambda given: given, server_cpu),
            "ahead": ahead(session),
        }
        for block in range(_BLOCKS + 1):
            for runner in list(runners.values())[:: 1 if block % 2 else -1]:
                runner.run(batches)
            if block == 0:
                before = session.stats()
                for runner in runners.values():
                    runner.forget()
        after = session.stats()
    steps = _BLOCKS * len(batches)
    rates = {name: size.batch / median(runner.seconds) for name, runner in runners.items()}
    name, unit = f"train {hot}-hot, prefetch {DEPTH}", "samples/s"
    figures = [
        Figure(f"{name}: none, of torch", rates["without"], unit, None, rates["without"] / rates["torch"]),
        Figure(f"{name}: ahead, of torch", rates["ahead"], unit, LIMIT_OF_TORCH, rates["ahead"] / rates["torch"]),
    ]
    for kind in ("without", "ahead"):
        for place, clock in (("worker", runners[kind].worker_cpu), ("server", runners[kind].server_cpu)):
            cpu = sum(clock.seconds) / (measured * _BLOCKS) * 1000
            figures.append(Figure(f"{name}: {kind}, {place} CPU", cpu, "ms/step", higher_is_better=False))
    pulled_ahead = after.rows_prefetched - before.rows_prefetched
    deferred = after.rows_deferred - before.rows_deferred
    sent_again = (after.bytes_refreshed - before.bytes_refreshed) / steps / 1e6
    return [
        *figures,
        Figure(f"{name}: keys that the batch before had as well", 100 * _overlap(batches), "%", higher_is_better=False),
        Figure(
            f"{name}: rows left for their step", 100 * deferred / (pulled_ahead + deferred), "%", higher_is_better=False
        ),
        Figure(f"{name}: sent again", sent_again, "MB/step", higher_is_better=False),
    ]


def _overlap(batches: list[Batch]) -> float:
    """Returns the share of a batch's unique keys that the batch before has as well, over all tables."""
    shared = total = 0
    keys = [[np.unique(table.numpy()) for table in ids] for ids, _ in batches]
    for earlier, later in pairwise(keys):
        for known, asked in zip(earlier, later, strict=True):
            shared += len(np.intersect1d(known, asked, assume_unique=True))
            total += len(asked)
    return shared / total
