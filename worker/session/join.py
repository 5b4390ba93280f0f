"""A session in torch's ``Join``: what a worker whose data has ended does while others go on.

    with Join([ddp_model, session]):      # in this order: hooks shadow a step's collectives in the order of the list
        for batch in uneven_loader: ...   # ends with session.step(dense)

For each step of the others the worker ends an empty one: it takes part in the vote and sends an empty commit, so at
staleness 0 no worker waits for it. Gradients of rows stay divided by the number of workers that the job began with, as
DDP's are by default (``divide_by_initial_world_size``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook

from ...proto.errors import FailedPrecondition, InvalidArgument, not_allowed


class SessionJoinHook(JoinHook):
    """Ends empty steps.

    Args:
        end_empty_step: one more.
        micro_batches: forwards of each step of the others.
    """

    def __init__(self, end_empty_step: Callable[[], None], micro_batches: int) -> None:
        self._end_empty_step = end_empty_step
        self._micro_batches = micro_batches
        self._shadowed = 0

    def main_hook(self) -> None:
        """For each forward that others still do."""
        self._shadowed += 1
        if self._shadowed % self._micro_batches == 0:
            self._end_empty_step()


def checked_micro_batches(options: dict[str, Any]) -> int:
    """The keyword arguments of ``Join`` that concern a session; those of other joinables are theirs.

    Raises:
        InvalidArgument: ``divide_by_initial_world_size=False``, or ``micro_batches`` below 1.
    """
    if not options.get("divide_by_initial_world_size", True):
        raise InvalidArgument(
            "Join.divide_by_initial_world_size: False is not allowed; allowed: True, as the shards divide gradients of "
            "rows by the number of workers that the job began with"
        )
    count = options.get("micro_batches", 1)
    if not isinstance(count, int) or count < 1:
        raise not_allowed("Join.micro_batches", count, "an integer >= 1")
    return count


def check_place_in_join(session: Joinable, dense: torch.optim.Optimizer | None) -> None:
    """Refuses what would wait for ever, or go wrong in silence.

    Raises:
        InvalidArgument: dense gradients are reduced before the session's step, and it is the first in the list, so
            that its hooks would answer the model's collectives; or each worker has a part of the optimizer's state
            (ZeRO): DDP leaves no gradients with a worker whose data has ended, and its part would stand still.
    """
    config = session._join_config
    if dense is None or not config.enable:
        return
    if isinstance(dense, Joinable):
        raise InvalidArgument(
            f"Join: {type(dense).__name__} is not allowed, as a worker's part of its state would stand still when the "
            "worker's data has ended; allowed: an optimizer that each worker has whole"
        )
    if config.is_first_joinable:
        raise InvalidArgument(
            "Join: the session must stand behind the DistributedDataParallel model: Join([ddp_model, session])"
        )


def collective_device() -> torch.device:
    """Where a tensor must be for a collective call of the default process group."""
    if "cpu" not in dist.get_backend_config() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def default_group() -> Any:
    """The process group of a session's collectives.

    Raises:
        FailedPrecondition: torch.distributed is not initialised.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise FailedPrecondition("Join: a session needs torch.distributed to be initialised")
    return dist.group.WORLD
