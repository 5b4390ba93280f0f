"""Ranks of gloo groups as forks of one process that has imported what they need: importing it takes seconds of CPU."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

_WELL = "ended well in"


def fork_ranks(
    world: int, meet: str, run: Callable[[int], None], *, deadline_sec: float, lost: tuple[int, ...] = ()
) -> None:
    """Runs ``run(rank)`` in each rank of a gloo group; fails unless all end well in time.

    Call it in a process without threads.

    Args:
        world: the number of ranks.
        meet: a file that does not exist yet, by which the ranks meet.
        run: what a rank does.
        deadline_sec: the deadline of all ranks, and of their collective calls, in seconds.
        lost: ranks that are to end by SIGKILL.
    """
    ranks = {_forked(rank, world, meet, run, deadline_sec): rank for rank in range(world)}
    failed, deadline = [], time.monotonic() + deadline_sec
    try:
        while ranks and time.monotonic() < deadline:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                time.sleep(0.01)
                continue
            rank = ranks.pop(pid)
            if os.waitstatus_to_exitcode(status) != (-signal.SIGKILL if rank in lost else 0):
                failed.append(rank)
        assert not ranks, f"{meet}: ranks {sorted(ranks.values())} did not end within {deadline_sec:g} s"
        assert not failed, f"{meet}: ranks {failed} failed\n" + "".join(_said(meet, rank) for rank in failed)
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def fork_cases(
    cases: Mapping[str, tuple[int, Callable[..., None]]],
    address: str,
    folder: str,
    only: str,
    *,
    killed: Mapping[str, tuple[int, ...]],
) -> None:
    """Runs ``case(rank, address=, folder=)`` in the ranks of each case in turn, for :func:`check_case` of each.

    A case that fails leaves its errors, and the others run.

    Call it where Triton does not interpret kernels: those of lookups have their own tests, and are slow there.

    Args:
        cases: the number of ranks and the case, by name.
        address: the address of the cluster.
        folder: the folder of what the cases leave.
        only: a part of the names of the cases to run; empty: all.
        killed: the ranks that are to end by SIGKILL, by name.
    """
    import torch._dynamo

    import sparserow.worker.layers.device_layers  # noqa: F401 -- imported before the forks

    torch.set_num_threads(1)
    path = Path(folder)
    for name, (world, case) in cases.items():
        if only in name:
            begin = time.monotonic()
            run = functools.partial(case, address=address, folder=path)
            try:
                fork_ranks(world, f"{folder}/meet {name}", run, deadline_sec=60, lost=killed.get(name, ()))
                said = f"{_WELL} {time.monotonic() - begin:.1f} s"
            except AssertionError as error:
                said = str(error)
            (path / name).write_text(said)


def check_case(folder: Path, name: str) -> None:
    """Fails with the errors of its ranks unless a case of :func:`fork_cases` ended well."""
    assert (folder / name).exists(), f"{name}: it did not run; an earlier case took the time"
    said = (folder / name).read_text()
    assert said.startswith(_WELL), said


def _said(meet: str, rank: int) -> str:
    errors = Path(f"{meet} {rank}")
    return errors.read_text() if errors.exists() else f"rank {rank} ended by a signal\n"


def _forked(rank: int, world: int, meet: str, run: Callable[[int], None], deadline_sec: float) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        torch.set_num_threads(1)
        with group(rank, world, meet, deadline_sec):
            run(rank)
        code = 0
    except BaseException:
        Path(f"{meet} {rank}").write_text(f"rank {rank} of {meet}:\n{traceback.format_exc()}")
    finally:
        os._exit(code)


@contextlib.contextmanager
def group(rank: int, world: int, meet: str, deadline_sec: float) -> Iterator[None]:
    """A gloo group for the block."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meet}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=deadline_sec),
    )
    yield
    dist.destroy_process_group()
