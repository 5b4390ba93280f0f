"""The terms of a job, which all its workers give alike: their number, the staleness and the scale of gradients."""

from __future__ import annotations

from typing import Literal

from .errors import InvalidArgument, not_allowed

GradScaleName = Literal["mean", "sum"]
GRAD_SCALES: tuple[GradScaleName, ...] = ("mean", "sum")  # in the order of the message's enum


def check_terms(*, rank: int, world_size: int, staleness: int | None, grad_scale: str) -> None:
    """Refuses what no job may have.

    Args:
        rank: the rank of a worker, in [0, world_size).
        world_size: the number of workers of the job.
        staleness: the staleness in steps; None means asynchronous.
        grad_scale: the name of the scale, one of ``GRAD_SCALES``.

    Raises:
        InvalidArgument: a value is out of its range; the text names it and what is allowed.
    """
    if not 0 <= rank < world_size < 2**31 or (staleness is not None and not 0 <= staleness < 2**31):
        raise InvalidArgument(
            f"register_worker: rank {rank}, world_size {world_size}, staleness {staleness}; "
            "allowed: 0 <= rank < world_size, staleness >= 0 or None"
        )
    if grad_scale not in GRAD_SCALES:
        raise not_allowed("grad_scale", grad_scale, GRAD_SCALES)
