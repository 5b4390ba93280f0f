"""Faults of workers as ``sparserow status`` shows them: lines of a table, and in full with tracebacks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from ...proto import control_pb2 as pb


@dataclass(frozen=True)
class FaultView:
    """A worker that ended by an exception, or without a word.

    Attributes:
        time: Unix seconds.
        job: ``NAMESPACE/NAME``.
        incident: faults of a job that belong together have one number.
        after_sec: since the first fault of the incident, which stands first; 0.0 of that one.
        echo: of a kind that the end of another process causes.
        message: one line.
        traceback: empty where there is none, or only the line was asked for.
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
        """Rank, host and process."""
        host = self.host or "a host that it did not name"
        return f"rank {self.rank} on {host}" + (f" (process {self.pid})" if self.pid else "")


def fault_views(faults: Iterable[pb.Fault]) -> tuple[FaultView, ...]:
    """In the order of a reply: the newest incident first, in it the first fault."""
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
    """The time of an incident's first fault; of the others how much later, or earlier, they came."""
    if not is_first:
        return f"{fault.after_sec:+.1f} s"
    return datetime.fromtimestamp(fault.time).strftime("%Y-%m-%d %H:%M:%S")


def with_firsts(faults: Sequence[FaultView]) -> list[tuple[FaultView, bool]]:
    """Each with whether it is the first of its incident."""
    former = [None, *((fault.job, fault.incident) for fault in faults)]
    return [(fault, (fault.job, fault.incident) != before) for fault, before in zip(faults, former, strict=False)]


def fault_text(faults: Sequence[FaultView]) -> str:
    """All of them with their tracebacks."""
    parts = []
    for fault, is_first in with_firsts(faults):
        kind = "" if is_first else ", likely an echo" if fault.echo else ", of the same incident"
        parts.append(f"{when(fault, is_first)}  job {fault.job}, {fault.where}{kind}\n{fault.message}")
        if fault.traceback:
            parts.append(fault.traceback.rstrip("\n"))
        parts.append("")
    return "\n".join(parts) if parts else "no worker has failed"
