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
    """This worker among its peers.

    Attributes:
        rank, world: this worker, and how many there are.
        meets: False where workers never meet (``train.dense`` ps): then, as with ``world`` 1, no collective is called
            and no process group is needed, and every method answers for this worker alone.
    """

    rank: int = 0
    world: int = 1
    meets: bool = True

    @property
    def is_alone(self) -> bool:
        """Whether the group has no other process to ask."""
        return self.world == 1 or not self.meets

    @property
    def makes_shared(self) -> bool:
        """Whether the value that this worker passes to :meth:`share` matters."""
        return self.rank == 0 or not self.meets

    def share(self, value: Value) -> Value:
        """Rank 0's value, on every rank. What the others pass does not matter."""
        if self.is_alone:
            return value
        box: list[Any] = [value if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=0)
        shared: Value = box[0]
        return shared

    def gather(self, values: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
        """All ranks' arrays joined along axis 0 in rank order, on rank 0; None elsewhere."""
        if self.is_alone:
            return values
        parts: list[Any] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(values, parts, dst=0)
        return None if parts is None else np.concatenate(parts)

    def collect(self, value: Value) -> list[Value]:
        """Every rank's value, in rank order, on every rank."""
        if self.is_alone:
            return [value]
        parts: list[Any] = [None] * self.world
        dist.all_gather_object(parts, value)
        return parts

    def total(self, value: int) -> int:
        """Sum over ranks, on every rank."""
        return sum(self.collect(value))

    def wait(self) -> None:
        """Returns when every rank has called it."""
        if not self.is_alone:
            dist.barrier()


@contextlib.contextmanager
def joined_group(rank: int, world: int, init_method: str | None) -> Iterator[WorkerGroup]:
    """Joins a gloo process group for the duration of the block; of a single worker nothing is joined.

    Args:
        rank, world: this worker, and how many there are.
        init_method: how they meet: ``file://PATH``, or ``env://`` under torchrun; None: never.
    """
    if world == 1 or init_method is None:
        yield WorkerGroup(rank, world, meets=init_method is not None)
        return
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world, timeout=_COLLECTIVE_DEADLINE)
    try:
        yield WorkerGroup(rank, world)
    finally:
        dist.destroy_process_group()
