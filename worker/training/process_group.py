"""The workers of a job as a group: rank, size, and the collective calls that a trainer needs."""

from __future__ import annotations

import contextlib
import datetime
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..session.rank_beats import DEFAULT_TIMEOUT, end_beats, give_signs, leave_group, meet
from .training_device import group_backend

_STEP = ""  # of calls within a step
Value = TypeVar("Value")


@dataclass(frozen=True)
class WorkerGroup:
    """A worker and its peers.

    Attributes:
        rank: the rank of this worker.
        world: the number of workers.
        meets: whether the workers have a process group. With ``train.dense`` ps they have none. Then, as with one
            worker, no collective is called, and every method answers for this worker alone.
        device: the device of this worker's model.
    """

    rank: int = 0
    world: int = 1
    meets: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_alone(self) -> bool:
        """Whether this worker calls no collectives, as it is the only one or there is no process group."""
        return self.world == 1 or not self.meets

    @property
    def is_first(self) -> bool:
        """Whether this process writes and reports what the job writes and reports once."""
        return self.rank == 0

    @property
    def makes_shared(self) -> bool:
        """Whether the value that this worker passes to :meth:`share` matters."""
        return self.rank == 0 or not self.meets

    def share(self, value: Value, *, what: str = _STEP) -> Value:
        """Returns the value that rank 0 passed, on every rank; the values of other ranks are ignored.

        Args:
            value: the value.
            what: what rank 0 may have done alone for it, for which the others wait as long as it lives; the default is
                for calls within a step, which ranks reach together.
        """
        if self.is_alone:
            return value
        self._meet(what)
        box: list[Any] = [value if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=0)
        shared: Value = box[0]
        return shared

    def to_rank(self, value: Value, rank: int) -> list[Value] | None:
        """Returns every rank's value, in rank order, on one rank; None on other ranks."""
        if self.is_alone:
            return [value]
        parts: list[Any] | None = [None] * self.world if self.rank == rank else None
        dist.gather_object(value, parts, dst=rank)
        return parts

    def exchange(self, values: Sequence[Value]) -> list[Value]:
        """Returns what every rank has for this one, in rank order.

        Args:
            values: a value for each rank; alone, the one for this worker.
        """
        if self.is_alone:
            return list(values)
        mine: list[Value] = []
        for rank, value in enumerate(values):
            mine = self.to_rank(value, rank) or mine
        return mine

    def collect(self, value: Value, *, what: str = _STEP) -> list[Value]:
        """Returns every rank's value, in rank order, on every rank; ``what`` is that of :meth:`share`."""
        if self.is_alone:
            return [value]
        self._meet(what)
        parts: list[Any] = [None] * self.world
        dist.all_gather_object(parts, value)
        return parts

    def total(self, value: int) -> int:
        """Returns the sum of the values over ranks, on every rank."""
        return sum(self.collect(value))

    def wait(self, what: str) -> None:
        """Waits until every rank has called it; ``what`` is that of :meth:`share`."""
        self.collect(None, what=what)

    def _meet(self, what: str) -> None:
        if what != _STEP:
            meet(what)


@contextlib.contextmanager
def joined_group(
    rank: int,
    world: int,
    init_method: str | None,
    *,
    device: torch.device | None = None,
    timeout: datetime.timedelta = DEFAULT_TIMEOUT,
) -> Iterator[WorkerGroup]:
    """Joins a process group for the duration of the block; a single worker joins none.

    Tensors on the host are reduced by gloo, those on CUDA by NCCL.

    Args:
        rank: the rank of this worker.
        world: the number of workers.
        init_method: how the workers find each other: ``file://PATH``, or ``env://`` under torchrun. None: there is no
            process group.
        device: the device of this worker's model; None: the host.
        timeout: how long a collective call may take, and how long a worker that others wait for may give no sign of
            life.
    """
    device = device or torch.device("cpu")
    if world == 1 or init_method is None:
        yield WorkerGroup(rank, world, meets=init_method is not None, device=device)
        return
    # Because the defaults of its functions are the group that exists when it is first imported, as DDP does: a group
    # that exists then outlives its end, and one of its threads may drop a tensor when Python is gone, which aborts.
    importlib.import_module("torch.distributed.nn.functional")
    dist.init_process_group(
        group_backend(device),
        init_method=init_method,
        rank=rank,
        world_size=world,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    give_signs()
    try:
        yield WorkerGroup(rank, world, device=device)
    except BaseException as error:
        leave_group(error)
        raise
    finally:
        end_beats()
        dist.destroy_process_group()
