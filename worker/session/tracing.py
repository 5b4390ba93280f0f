"""What ran when, on which thread, in the format that Perfetto and chrome://tracing open.

One span is one complete event ("ph": "X") of the Trace Event Format, times in microseconds of the wall clock; a job's
worker is a process, its threads are the rows. Spans of one thread nest.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

Item = TypeVar("Item")
ThreadName: TypeAlias = tuple[int, str]  # the operating system's id, and what it is called
_NO_THREAD = 1 << 32  # above every thread's id: rows of what overlaps itself


class Trace(Protocol):
    """Where spans go."""

    @property
    def is_recording(self) -> bool:
        """Whether anything is kept."""
        ...

    def span(self, name: str, *, step: int) -> contextlib.AbstractContextManager[None]:
        """The body's time, as ``name`` of ``step``, on the calling thread."""
        ...

    def add(self, name: str, begin_ns: int, end_ns: int, *, step: int, thread: ThreadName | None = None) -> None:
        """A span timed with ``time.perf_counter_ns``, on the calling thread or another."""
        ...

    def end_step(self, next_step: int) -> None:
        """A step of the session is over; on the thread that trains."""
        ...


class _Silence:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class NoTrace:
    """Keeps nothing."""

    is_recording = False
    _SILENCE = _Silence()

    def span(self, name: str, *, step: int) -> contextlib.AbstractContextManager[None]:
        """Nothing but the body."""
        del name, step
        return self._SILENCE

    def add(self, name: str, begin_ns: int, end_ns: int, *, step: int, thread: ThreadName | None = None) -> None:
        """Nothing."""

    def end_step(self, next_step: int) -> None:
        """Nothing."""


class RecordedTrace:
    """Keeps every span in memory, about 300 bytes each. Thread-safe.

    Args:
        rank: of the worker.
    """

    is_recording = True

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self._events: list[dict[str, Any]] = []
        self._rows: dict[int, str] = {}

    @contextlib.contextmanager
    def span(self, name: str, *, step: int) -> Iterator[None]:
        """See :class:`Trace`."""
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(name, begin, time.perf_counter_ns(), step=step)

    def add(self, name: str, begin_ns: int, end_ns: int, *, step: int, thread: ThreadName | None = None) -> None:
        """See :class:`Trace`."""
        row, title = thread or (threading.get_native_id(), threading.current_thread().name)
        self._rows.setdefault(row, title)
        event = {
            "name": name,
            "ph": "X",
            "ts": (begin_ns + self._epoch_ns) / 1000,
            "dur": (end_ns - begin_ns) / 1000,
            "pid": self._rank,
            "tid": row,
            "args": {"step": step},
        }
        self._events.append(event)  # atomic under the GIL

    def end_step(self, next_step: int) -> None:
        """See :class:`Trace`: all is kept until it is asked for."""

    def events(self) -> list[dict[str, Any]]:
        """All spans so far, after the names of worker and threads."""
        names = [("process_name", 0, f"worker {self._rank}")]
        names += [("thread_name", row, title) for row, title in list(self._rows.items())]
        metadata = [
            {"name": kind, "ph": "M", "pid": self._rank, "tid": row, "args": {"name": title}}
            for kind, row, title in names
        ]
        return [*metadata, *self._events]


def write_trace(path: Path, events: Sequence[dict[str, Any]]) -> None:
    """Writes the events of all workers as one file."""
    path.write_text(json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"}))


def loaded(batches: Iterable[Item], trace: Trace, step_of: Callable[[], int]) -> Iterator[Item]:
    """``batches``, with a span ``load`` around each wait for one."""
    source = iter(batches)
    while True:
        with trace.span("load", step=step_of()):
            try:
                batch = next(source)
            except StopIteration:
                return
        yield batch


def trace_allreduce(model: DistributedDataParallel, trace: Trace, step_of: Callable[[], int]) -> None:
    """A span for each bucket that DDP reduces, from its start to its end; the reduction stays DDP's own."""

    def reduce(group: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        step, begin = step_of(), time.perf_counter_ns()

        def end(reduced: torch.futures.Future[Tensor]) -> Tensor:
            row = (_NO_THREAD + bucket.index(), f"allreduce, bucket {bucket.index()}")
            trace.add("allreduce", begin, time.perf_counter_ns(), step=step, thread=row)
            return reduced.value()

        return allreduce_hook(group, bucket).then(end)

    reduce.__annotations__.clear()  # DDP compares them with its types, and this module's are text
    model.register_comm_hook(None, reduce)
