"""A session in torch's ``Join``: a worker whose data has ended goes on with empty steps while others train.

    with Join([ddp_model, session]):      # the order matters: hooks answer a step's collectives in the list's order
        for batch in uneven_loader: ...   # ends with session.step(dense)

For each step of the others, that worker ends an empty step, which takes part in the vote and sends an empty commit.
So at staleness 0 no worker waits for it. Gradients of rows stay divided by the number of workers that the job began
with, as DDP's gradients are by default (``divide_by_initial_world_size``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook

from ...proto.errors import FailedPrecondition, InvalidArgument, not_allowed


class SessionJoinHook(JoinHook):
    """The hook that torch's ``Join`` calls on a worker whose data has ended; it ends empty steps.

    Args:
        end_empty_step: ends one empty step.
        micro_batches: the number of forwards in each step of the other workers.
    """

    def __init__(self, end_empty_step: Callable[[], None], micro_batches: int) -> None:
        self._end_empty_step = end_empty_step
        self._micro_batches = micro_batches
        self._shadowed = 0

    def main_hook(self) -> None:
        """Is called once for each forward of the other workers; ends an empty step after ``micro_batches`` calls."""
        self._shadowed += 1
        if self._shadowed % self._micro_batches == 0:
            self._end_empty_step()


def checked_micro_batches(options: dict[str, Any]) -> int:
    """Checks the keyword arguments of ``Join`` that concern a session, and returns ``micro_batches``.

    Other arguments belong to other joinables and are not looked at.

    Raises:
        InvalidArgument: ``divide_by_initial_world_size=False``, or ``micro_batches`` below 1.
    """
    if not options.get("divide_by_initial_world_size", True):
        raise not_allowed(
            "Join.divide_by_initial_world_size",
            options["divide_by_initial_world_size"],
            "True, as the shards divide gradients of rows by the number of workers that the job began with",
        )
    count = options.get("micro_batches", 1)
    if not isinstance(count, int) or count < 1:
        raise not_allowed("Join.micro_batches", count, "an integer >= 1")
    return count


def check_place_in_join(session: Joinable, dense: torch.optim.Optimizer | None) -> None:
    """Refuses uses of ``Join`` that would wait for ever, or train wrongly in silence.

    Args:
        session: the session, as ``Join`` sees it.
        dense: the optimizer of the dense side; None: this worker reduces no dense gradients.

    Raises:
        InvalidArgument: the session is the first joinable in the list. Its hooks would then answer the collectives of
            the model, whose gradients are reduced before the session's step. Or each worker has a part of the
            optimizer's state (ZeRO): DDP leaves no gradients with a worker whose data has ended, so that its part
            would not be updated.
    """
    config = session._join_config
    if dense is None or not config.enable:
        return
    if isinstance(dense, Joinable):
        raise InvalidArgument(
            f"Join: {type(dense).__name__} is not allowed, as a worker's part of its state is not updated after the "
            "worker's data has ended; allowed: an optimizer that each worker has whole"
        )
    if config.is_first_joinable:
        raise InvalidArgument(
            "Join: the session must stand behind the DistributedDataParallel model: Join([ddp_model, session])"
        )


def collective_device() -> torch.device:
    """Returns the device on which a tensor must be for a collective call of the default process group."""
    if "cpu" not in dist.get_backend_config() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def default_group() -> Any:
    """Returns the process group that a session's collective calls use, which is the default group.

    Raises:
        FailedPrecondition: torch.distributed is not initialised.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise FailedPrecondition("Join: a session needs torch.distributed to be initialised")
    return dist.group.WORLD
