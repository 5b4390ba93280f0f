"""Checks the nodes of a job under torchrun before it begins, and leaves bad ones out where there are spare nodes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...proto.config.job import JobConfig
from ...proto.errors import FailedPrecondition, InvalidArgument
from ..preflight.node_check import CheckSettings
from ..preflight.node_meeting import CheckedNodes, NodeMeeting, NodePlace
from ..preflight.spare_nodes import agent_command, least_nodes
from .training_job import TorchrunPlace


@dataclass(frozen=True)
class CheckedPlace:
    """The position of this process after the check of ``train.node_check``.

    Attributes:
        place: its position among the processes of the nodes that are left; None when torchrun did not start it.
        is_left_out: whether the job runs without this process.
    """

    place: TorchrunPlace | None
    is_left_out: bool = False


@contextlib.contextmanager
def checked_place(job: JobConfig, place: TorchrunPlace | None) -> Iterator[CheckedPlace]:
    """Yields the position of this process in the job, after all nodes were checked as ``train.node_check`` says.

    Without that section it yields ``place`` at once. A process of a node that was left out gets through after the job
    of the others has ended; the caller does nothing in the block then.

    Args:
        job: the job.
        place: the position under torchrun; None when torchrun did not start this process.

    Raises:
        InvalidArgument: the job has ``train.node_check``, and torchrun did not start this process.
        FailedPrecondition: a node is bad, and the launcher has no spare node. The text names the node.
        Unavailable, DeadlineExceeded: node 0 cannot be reached, or does not answer.
    """
    config = job.train.node_check
    if config is None:
        yield CheckedPlace(place)
        return
    where = NodePlace.from_environment()
    if place is None or where is None:
        raise InvalidArgument(
            "train.node_check: has no effect without torchrun or Ray, as the job runs on this machine alone; remove "
            "the section"
        )
    from torch.distributed.elastic.multiprocessing.errors import record  # this import is slow

    # The agent of torchrun shows the error of the check, as it shows those of the job.
    checked = record(_check)(where, CheckSettings.of(config, on_host=job.train.is_on_host))
    assert checked is not None
    meeting, found = checked
    if not found.verdict.bad:
        _print(where, f"{_count(found.good)} checked, all are ok")
        yield CheckedPlace(place)
        return
    if where.node not in found.good:
        print(f"sparserow: node check: this is node {where.node}, which is left out", file=sys.stderr, flush=True)
        meeting.wait_for_end(found.good)
        yield CheckedPlace(place, is_left_out=True)
        return
    _print(where, f"{found.verdict.sentence()}; the job runs on {_count(found.good)}", first=found.good[0])
    _use_store(meeting.address)
    with meeting.pulse():
        yield CheckedPlace(replaced(place, where, found))


def _check(where: NodePlace, settings: CheckSettings) -> tuple[NodeMeeting, CheckedNodes]:
    meeting = NodeMeeting(where, settings)
    found = meeting.check()
    if found.verdict.bad:
        _check_spares(found)
    return meeting, found


def replaced(place: TorchrunPlace, where: NodePlace, found: CheckedNodes) -> TorchrunPlace:
    """Returns the position of a process of a good node among the processes of all good nodes.

    Args:
        place: its position among all processes.
        where: the position of its node.
        found: what the check found.
    """
    before = sum(found.processes[node] for node in found.good if node < where.node)
    world = sum(found.processes[node] for node in found.good)
    return replace(place, rank=before + where.local_rank, world=world)


def _check_spares(found: CheckedNodes) -> None:
    least = least_nodes(agent_command(), os.environ)
    if found.good and least is not None and len(found.good) >= least:
        return
    need = "the launcher is not torchrun, so that no spare node is known" if least is None else f"it needs {least}"
    raise FailedPrecondition(
        f"node check: {found.verdict.sentence()}; {_count(found.good)} would be left for the job, and {need}"
    )


def _use_store(address: tuple[str, int]) -> None:
    """Has torch.distributed's ``env://`` meet at the check's store, which a process of node 0 hosts until the end.

    torchrun's own address may belong to a process that is left out, and the new rank 0 would try to host it anew.
    """
    os.environ.update(MASTER_ADDR=address[0], MASTER_PORT=str(address[1]), TORCHELASTIC_USE_AGENT_STORE="True")


def _print(where: NodePlace, text: str, first: int = 0) -> None:
    if where.node == first and where.local_rank == 0:
        print(f"sparserow: node check: {text}", file=sys.stderr, flush=True)


def _count(nodes: tuple[int, ...]) -> str:
    return f"{len(nodes)} node{'' if len(nodes) == 1 else 's'}"
