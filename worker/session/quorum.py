"""The rules of a session whose steps have a quorum, instead of all workers."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...proto.errors import FailedPrecondition, InvalidArgument, not_allowed
from .session_parts import Placement


def check_quorum(placement: Placement, *, is_mesh: bool) -> None:
    """Checks the quorum that ``connect`` was given.

    Args:
        placement: the rules of the job; a quorum of None is allowed beside all of them.
        is_mesh: whether the worker has its place in a mesh.

    Raises:
        InvalidArgument: the quorum is out of its range, or is not possible with another argument.
    """
    quorum = placement.quorum
    if quorum is None:
        return
    if not isinstance(quorum, int) or not 1 <= quorum <= placement.world_size:
        raise not_allowed("connect.quorum", quorum, f"1 to {placement.world_size} (world_size), or None")
    if placement.staleness != 0:
        raise not_allowed("connect.quorum", quorum, "None unless staleness is 0")
    if is_mesh:
        raise not_allowed("connect.quorum", quorum, "None beside mesh, whose ranks step together")


def check_step(placement: Placement, dense: torch.optim.Optimizer | None) -> None:
    """Checks that a step of this worker needs no other worker.

    Args:
        placement: the rules of the job.
        dense: the optimizer of the dense side; None: there is none here.

    Raises:
        InvalidArgument: there is a quorum and a dense optimizer, which would step without the other workers.
        FailedPrecondition: there is a quorum and a process group, in which every step would wait for all ranks.
    """
    if placement.quorum is None:
        return
    if dense is not None:
        raise InvalidArgument(
            "session.step: dense is not possible with a quorum; move the tensors to the servers (dense_on_servers)"
        )
    if placement.world_size > 1 and dist.is_available() and dist.is_initialized():
        raise FailedPrecondition(
            "session.step: a quorum is not possible within a torch.distributed process group, whose ranks vote over "
            "every step; start the workers without one"
        )
