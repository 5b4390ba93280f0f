"""Keeps a bounded list, by job, of workers that ended by an exception or without a report. The module does no I/O.

Faults of a job that belong together are an *incident*: each rank at most once, within a minute. The first fault of an
incident comes first. Faults of a kind that the end of another process causes (*echoes*) come after the others, whenever
they were reported. Times are Unix seconds that the caller passes in. The module is not thread-safe.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

MOST_OF_JOB = 32
MOST_OF_INCIDENT = 16
MOST = 128  # faults of all jobs, whose tracebacks fit one gRPC message
MOST_SAVED = 32
MESSAGE_CHARS = 500
TRACEBACK_BYTES = 16 << 10
_HOST_CHARS = 255
_INCIDENT_SEC = 60.0
_NOT_KEPT = "its traceback was in the memory of a coordinator that has ended\n"


@dataclass(frozen=True)
class Fault:
    """One fault of a worker; the fields are those of the message in control.proto."""

    namespace: str
    job: str
    rank: int
    worker_id: int
    epoch: int
    host: str
    pid: int
    time: float
    message: str
    traceback: str = ""
    echo: bool = False
    incident: int = 0

    @property
    def order(self) -> tuple[bool, float]:
        """The sort key of the fault in its incident."""
        return self.echo, self.time


@dataclass(frozen=True)
class Process:
    """A process that registered as a worker and has not reported its end since."""

    rank: int
    epoch: int
    host: str
    pid: int


@dataclass
class FaultBook:
    """All faults that a coordinator remembers, and the processes that may still have one.

    Attributes:
        processes: the processes that have not reported their end, by (job id, worker id).
        seen: the number of faults since the start, including forgotten ones.
    """

    processes: dict[tuple[int, int], Process] = field(default_factory=dict)  # by (job id, worker id)
    seen: int = 0
    _due: dict[tuple[int, int], float] = field(default_factory=dict)  # the time of each worker's next heartbeat
    _faults: dict[str, list[Fault]] = field(default_factory=dict)  # by full name of the job, in order of arrival

    def came(self, full_name: str, key: tuple[int, int], process: Process, now: float) -> Fault | None:
        """Notes that a process has registered.

        Returns:
            The fault of the worker's former process, when it never reported its end; None otherwise.
        """
        process = replace(process, host=one_line(process.host, _HOST_CHARS))
        former = self.processes.get(key)
        due = self._due.pop(key, now)
        self.processes[key] = process
        if former is None or not former.host or (former.host, former.pid) == (process.host, process.pid):
            return None
        if self._said_why(full_name, now):
            return None  # the launcher ended the former process because of that fault
        return self._add(
            full_name, key[1], former, min(now, due), "it ended without a report; another process took its place"
        )

    def left(self, key: tuple[int, int], epoch: int) -> None:
        """Notes that a worker has left in order, or was not admitted."""
        process = self.processes.get(key)
        if process is not None and process.epoch == epoch:
            del self.processes[key]
            self._due.pop(key, None)

    def heard(self, key: tuple[int, int], due: float) -> None:
        """Notes that a worker lives; its next heartbeat is due at ``due``."""
        if key in self.processes:  # a heartbeat may arrive after the report of the worker's end
            self._due[key] = due

    def lease_ended(
        self, full_name: str, key: tuple[int, int], rank: int, epoch: int, now: float, lease_sec: float
    ) -> Fault:
        """Notes that a worker's lease has ended; the fault has the time of the missing heartbeat."""
        process = self.processes.get(key, Process(rank, epoch, "", 0))
        missed = self._due.get(key, now - lease_sec * 2 / 3)
        self.left(key, epoch)
        message = "its lease has ended: it was killed or held up, or its host cannot be reached"
        return self._add(full_name, key[1], process, missed, message, echo=self._said_why(full_name, missed))

    def report(
        self, full_name: str, key: tuple[int, int], process: Process, now: float, message: str, trace: str, echo: bool
    ) -> Fault:
        """Notes a worker's report of why it ends."""
        self.left(key, process.epoch)
        words = one_line(message, MESSAGE_CHARS) or "an error without a message"
        process = replace(process, host=one_line(process.host, _HOST_CHARS))
        return self._add(full_name, key[1], process, now, words, bounded_traceback(trace), echo)

    def listed(self) -> list[Fault]:
        """Returns the faults, the newest incident first; in an incident they are sorted by :attr:`Fault.order`."""
        incidents: dict[tuple[str, int], list[Fault]] = {}
        for full_name, faults in self._faults.items():
            for fault in faults:
                incidents.setdefault((full_name, fault.incident), []).append(fault)
        newest = sorted(incidents.values(), key=lambda each: max(fault.time for fault in each), reverse=True)
        return [fault for incident in newest for fault in sorted(incident, key=lambda fault: fault.order)]

    def to_document(self) -> dict[str, Any]:
        """Returns the saved form. It has no tracebacks, because it is written with every change of the cluster."""
        newest = sorted((fault for faults in self._faults.values() for fault in faults), key=lambda fault: fault.time)
        return {
            "processes": [[*key, *asdict(process).values()] for key, process in self.processes.items()],
            "faults": [
                {**asdict(fault), "traceback": _NOT_KEPT if fault.traceback else ""} for fault in newest[-MOST_SAVED:]
            ],
        }

    @staticmethod
    def of_document(saved: dict[str, Any]) -> FaultBook:
        """Returns the faults of a saved form."""
        book = FaultBook()
        for job_id, worker_id, *process in saved["processes"]:
            book.processes[job_id, worker_id] = Process(*process)
        for values in saved["faults"]:
            fault = Fault(**values)
            book._faults.setdefault(f"{fault.namespace}/{fault.job}", []).append(fault)
        return book

    def _said_why(self, full_name: str, time: float) -> bool:
        """Whether a worker has reported an error that is no echo within the minute before ``time``."""
        first = next(iter(self._last_incident(full_name)), None)
        return first is not None and bool(first.traceback) and not first.echo and 0 <= time - first.time < _INCIDENT_SEC

    def _last_incident(self, full_name: str) -> list[Fault]:
        faults = self._faults.get(full_name, [])
        last = max((fault.incident for fault in faults), default=0)
        return sorted((fault for fault in faults if fault.incident == last), key=lambda fault: fault.order)

    def _completed(
        self, full_name: str, fault: Fault, process: Process, message: str, traceback: str, echo: bool
    ) -> Fault:
        """Adds the report to the fault of a worker whose lease had ended first; an echo does
        not replace its message.
        """
        if not traceback or fault.traceback:
            return fault
        kept = replace(fault, message=fault.message if echo else message, traceback=traceback)
        if not kept.host:
            kept = replace(kept, host=process.host, pid=process.pid)
        faults = self._faults[full_name]
        faults[faults.index(fault)] = kept
        return kept

    def _add(
        self,
        full_name: str,
        worker_id: int,
        process: Process,
        time: float,
        message: str,
        traceback: str = "",
        echo: bool = False,
    ) -> Fault:
        namespace, _, job = full_name.partition("/")
        last = self._last_incident(full_name)
        number = last[0].incident if last else 1
        known = [fault for fault in last if (fault.worker_id, fault.epoch) == (worker_id, process.epoch)]
        if known:
            return self._completed(full_name, known[0], process, message, traceback, echo)
        if last and (
            any(fault.rank == process.rank for fault in last)
            or abs(time - min(fault.time for fault in last)) > _INCIDENT_SEC
        ):
            number, last = number + 1, []
        fault = Fault(
            namespace=namespace,
            job=job,
            rank=process.rank,
            worker_id=worker_id,
            epoch=process.epoch,
            host=process.host,
            pid=process.pid,
            time=time,
            message=message,
            traceback=traceback,
            echo=echo,
            incident=number,
        )
        self.seen += 1
        faults = self._faults.setdefault(full_name, [])
        faults.append(fault)
        if len(last) == MOST_OF_INCIDENT:
            faults.remove(max((*last, fault), key=lambda each: each.order))
        del faults[:-MOST_OF_JOB]
        while sum(len(each) for each in self._faults.values()) > MOST:
            oldest = min(self._faults, key=lambda name: self._faults[name][0].time)
            del self._faults[oldest][0]
            if not self._faults[oldest]:
                del self._faults[oldest]
        return fault


def bounded_traceback(text: str) -> str:
    """Returns the text without control characters; a text that is too long loses its middle.

    A long text keeps a quarter of the bound from its beginning, and the rest from its end.
    """
    clean = "".join(char if char.isprintable() or char in "\n\t" else "?" for char in text)
    data = clean.encode("utf-8", "replace")
    if len(data) <= TRACEBACK_BYTES:
        return clean
    gap = f"\n... {len(data) - TRACEBACK_BYTES} bytes are left out ...\n"
    head = TRACEBACK_BYTES // 4
    tail = TRACEBACK_BYTES - head - len(gap)
    return data[:head].decode("utf-8", "ignore") + gap + data[-tail:].decode("utf-8", "ignore")


def one_line(text: str, most: int) -> str:
    """Returns the text in one line of at most ``most`` printable characters."""
    words = " ".join("".join(char if char.isprintable() else " " for char in text[: 4 * most]).split())
    return words if len(words) <= most else words[: most - 3] + "..."
