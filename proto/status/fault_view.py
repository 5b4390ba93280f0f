"""Faults of workers as ``sparserow status`` shows them: as lines of a table, and in full with tracebacks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from .. import control_pb2 as pb


@dataclass(frozen=True)
class FaultView:
    """A worker that ended by an exception, or without a report.

    Attributes:
        time: the time of the fault, in Unix seconds.
        job: the full name of the job, ``NAMESPACE/NAME``.
        incident: a number that the faults of a job that belong together share.
        after_sec: the seconds since the first fault of the incident; 0.0 for the first.
        echo: whether the fault is of a kind that the end of another process causes.
        message: the fault in one line.
        traceback: the traceback; empty where there is none, or only the line was asked for.
    """

    time: float
    job: str
    incident: int
    after_sec: float
    rank: int
    host: str
    pid: int
    echo: bool
    message: str
    traceback: str

    @property
    def where(self) -> str:
        """The rank, the host and the process, in words."""
        host = self.host or "a host that it did not name"
        return f"rank {self.rank} on {host}" + (f" (process {self.pid})" if self.pid else "")


def fault_views(faults: Iterable[pb.Fault]) -> tuple[FaultView, ...]:
    """Returns views in the order of the reply: the newest incident first, and the first fault of each first."""
    firsts: dict[tuple[str, int], float] = {}
    views = []
    for fault in faults:
        job = f"{fault.namespace}/{fault.job}"
        first = firsts.setdefault((job, fault.incident), fault.time)
        views.append(
            FaultView(
                time=fault.time,
                job=job,
                incident=fault.incident,
                after_sec=fault.time - first,
                rank=fault.rank,
                host=fault.host,
                pid=fault.pid,
                echo=fault.echo,
                message=fault.message,
                traceback=fault.traceback,
            )
        )
    return tuple(views)


def when(fault: FaultView, is_first: bool) -> str:
    """Returns the time of an incident's first fault; for other faults, the difference to it in seconds."""
    if not is_first:
        return f"{fault.after_sec:+.1f} s"
    return datetime.fromtimestamp(fault.time).strftime("%Y-%m-%d %H:%M:%S")


def with_firsts(faults: Sequence[FaultView]) -> list[tuple[FaultView, bool]]:
    """Returns each fault with whether it is the first of its incident."""
    former = [None, *((fault.job, fault.incident) for fault in faults)]
    return [(fault, (fault.job, fault.incident) != before) for fault, before in zip(faults, former, strict=False)]


def fault_text(faults: Sequence[FaultView]) -> str:
    """Returns all faults as text, with their tracebacks."""
    parts = []
    for fault, is_first in with_firsts(faults):
        kind = "" if is_first else ", likely an echo" if fault.echo else ", of the same incident"
        parts.append(f"{when(fault, is_first)}  job {fault.job}, {fault.where}{kind}\n{fault.message}")
        if fault.traceback:
            parts.append(fault.traceback.rstrip("\n"))
        parts.append("")
    return "\n".join(parts) if parts else "no worker has failed"
