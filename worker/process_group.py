"""The workers of one job as a group: rank, size, and the few collectives that a trainer needs."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

_COLLECTIVE_DEADLINE = datetime.timedelta(minutes=30)  # others wait that long while rank 0 takes statistics of the data

Value = TypeVar("Value")


@dataclass(frozen=True)
class WorkerGroup:
    """This worker among its peers. With ``world`` 1 no collective is called and no process group is needed."""

    rank: int = 0
    world: int = 1

    def share(self, value: Value) -> Value:
        """Rank 0's value, on every rank. What the others pass does not matter."""
        if self.world == 1:
            return value
        box: list[Any] = [value if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=0)
        shared: Value = box[0]
        return shared

    def gather(self, values: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
        """All ranks' arrays joined along axis 0 in rank order, on rank 0; None elsewhere."""
        if self.world == 1:
            return values
        parts: list[Any] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(values, parts, dst=0)
        return None if parts is None else np.concatenate(parts)

    def collect(self, value: Value) -> list[Value]:
        """Every rank's value, in rank order, on every rank."""
        if self.world == 1:
            return [value]
        parts: list[Any] = [None] * self.world
        dist.all_gather_object(parts, value)
        return parts

    def total(self, value: int) -> int:
        """Sum over ranks, on every rank."""
        return sum(self.collect(value))

    def wait(self) -> None:
        """Returns when every rank has called it."""
        if self.world > 1:
            dist.barrier()


@contextlib.contextmanager
def joined_group(rank: int, world: int, init_method: str) -> Iterator[WorkerGroup]:
    """Joins a gloo process group for the duration of the block; of a single worker nothing is joined.

    Args:
        rank, world: this worker, and how many there are.
        init_method: how they meet: ``file://PATH``, or ``env://`` under torchrun.
    """
    if world == 1:
        yield WorkerGroup()
        return
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world, timeout=_COLLECTIVE_DEADLINE)
    try:
        yield WorkerGroup(rank, world)
    finally:
        dist.destroy_process_group()
