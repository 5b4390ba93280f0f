"""``bench counted``: counts what a step on a device costs its host; no device is needed.

The model of ``bench train`` is on a device that lies in the host's memory (counting_device.py), once with its rows on a
shard and a prefetch, once with its tables on the device. Operations that would launch a kernel, copies and waits are
those of the package and of torch; the dense part runs alone beside them.

Then a step of a few samples is timed on the host itself, with the lookups as a device has them: what the host's thread
does however fast the device and however few the rows. There the rows are pulled in the forward, and tables on the
device are updated by the core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from ...cpp_ext.torch_ops import device_lookups_on_host
from .click_model import DIM, TABLES, Size, ZipfBatches
from .counting_device import COUNTS, device
from .gpu import OnHost, dense_step, distributed, step_of_session
from .harness import Figure, median

__all__ = ["FULL", "QUICK", "run_counted"]

MOST_ON_SERVERS = 40  # operations beyond the dense part, of rows on servers
MOST_ON_DEVICE = 60  # of tables on the device
MOST_MS = 1.5  # of the host, beyond the dense part
_DEPTH = 2
_DROPPED = 5

FULL = Size(rows=100_000, batch=4096, hot=(1, 10), repetitions=10)
QUICK = Size(rows=1_000, batch=64, hot=(2,), repetitions=5)
_FEW = Size(rows=100, batch=8, hot=(2,), repetitions=200)

_KINDS = ("dense part", "rows on a shard", "tables on the device")
_Batch = TypeVar("_Batch")


@dataclass(frozen=True)
class CountedSteps:
    """What a step took: the mean of counts, and the median of milliseconds."""

    operations: float
    to_device: float
    to_host: float
    mb_to_device: float
    mb_to_host: float
    waits: float
    ms: float


def run_counted(size: Size) -> Iterator[Figure]:
    """Yields all figures; see the docstring of the module."""
    for hot in size.hot:
        name = f"counted {hot}-hot, {TABLES} tables x {size.rows} x {DIM}, batch {size.batch}"
        dense, *others = _kinds_of_steps(size, hot, "rows", device())
        yield Figure(f"{name}, dense part: operations", dense.operations, "operations/step", higher_is_better=False)
        for what, steps, most in zip(_KINDS[1:], others, (MOST_ON_SERVERS, MOST_ON_DEVICE), strict=True):
            yield Figure(
                f"{name}, {what}: operations beyond the dense part",
                steps.operations - dense.operations,
                "operations/step",
                most,
                higher_is_better=False,
            )
            for figure, value, unit in (
                ("copies to the device", steps.to_device, "copies/step"),
                ("copies to the host", steps.to_host, "copies/step"),
                ("waits", steps.waits, "waits/step"),
                ("to the device", steps.mb_to_device, "MB/step"),
                ("to the host", steps.mb_to_host, "MB/step"),
            ):
                yield Figure(f"{name}, {what}: {figure}", value, unit, higher_is_better=False)
    few = replace(_FEW, repetitions=_FEW.repetitions if size.rows >= FULL.rows else size.repetitions)
    with device_lookups_on_host():
        dense, *others = _kinds_of_steps(few, few.hot[0], "few", torch.device("cpu"))
    name = f"counted, {TABLES} tables, batch {few.batch}, on the host"
    yield Figure(f"{name}, dense part: time", dense.ms, "ms/step", higher_is_better=False)
    for what, steps in zip(_KINDS[1:], others, strict=True):
        beyond = steps.ms - dense.ms
        yield Figure(f"{name}, {what}: time beyond the dense part", beyond, "ms/step", MOST_MS, higher_is_better=False)


def _ids_of(batch: OnHost) -> dict[str, Tensor]:
    return {f"tables.{table}": batch.ids[table] for table in range(TABLES)}


def _kinds_of_steps(size: Size, hot: int, name: str, there: torch.device) -> list[CountedSteps]:
    """Returns the steps of each of ``_KINDS``."""
    source, n = ZipfBatches(size, hot), size.repetitions
    batches = [OnHost(*source.make()) for _ in range(n + _DROPPED + _DEPTH)]
    step = dense_step(size, there)
    made = [_counted((each.labels.to(there) for each in batches), lambda labels: step(labels, labels), n)]
    with distributed(size, there, f"bench-counted-{name}") as (session, model):
        train = step_of_session(session, model)

        given: Iterable[OnHost] = batches
        if there.type != "cpu":
            given = session.prefetch(batches, _DEPTH, ids=_ids_of, device=there, on_host=lambda batch: [batch.ids])
        made.append(_counted(given, lambda batch: train(batch.ids, batch.labels), n))
    with distributed(size, there, f"bench-counted-{name}-there", "device") as (session, model):
        train_there = step_of_session(session, model)
        moved = ((each.ids.to(there), each.labels.to(there)) for each in batches)
        made.append(_counted(moved, lambda given: train_there(*given), n))
    return made


def _counted(batches: Iterable[_Batch], step: Callable[[_Batch], None], n: int) -> CountedSteps:
    """Counts ``n`` steps, with the copies of their batches, after some that are not counted."""
    seconds: list[float] = []
    for batch in batches:
        began = time.perf_counter()
        step(batch)
        seconds.append(time.perf_counter() - began)
        if len(seconds) == _DROPPED:
            COUNTS.reset()
        elif len(seconds) == _DROPPED + n:
            break
    return CountedSteps(
        COUNTS.operations.total() / n,
        COUNTS.to_device / n,
        COUNTS.to_host / n,
        COUNTS.bytes_to_device / n / 1e6,
        COUNTS.bytes_to_host / n / 1e6,
        (COUNTS.waits + COUNTS.to_host) / n,
        median(seconds[_DROPPED:]) * 1e3,
    )
