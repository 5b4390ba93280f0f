"""Records which part of a step ran when, and on which thread, for Perfetto and chrome://tracing.

One span is one complete event ("ph": "X") of the Trace Event Format, with times in microseconds of the wall clock. A
worker of the job is shown as a process, and each of its threads as a row. Spans of one thread nest.
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

from ...proto.process.whole_file import write_whole

Item = TypeVar("Item")
ThreadName: TypeAlias = tuple[int, str]  # the operating system's id of a thread, and the thread's name
_NO_THREAD = 1 << 32  # above every thread's id: ids of rows for spans that overlap spans of their own thread


class Trace(Protocol):
    """A receiver of spans."""

    @property
    def is_recording(self) -> bool:
        """Whether spans are recorded."""
        ...

    def span(self, name: str, *, step: int) -> contextlib.AbstractContextManager[None]:
        """Records the time that the body takes as a span ``name`` of ``step``, on the calling thread."""
        ...

    def add(self, name: str, begin_ns: int, end_ns: int, *, step: int, thread: ThreadName | None = None) -> None:
        """Records a span whose times were taken with ``time.perf_counter_ns``.

        Args:
            name: the name of the span.
            begin_ns: the time at which the span began, in nanoseconds.
            end_ns: the time at which the span ended, in nanoseconds.
            step: the step that the span belongs to.
            thread: the thread that the span ran on; None: the calling thread.
        """
        ...

    def end_step(self, next_step: int) -> None:
        """Is called by the thread that trains when a step of the session has ended."""
        ...


class _Silence:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class NoTrace:
    """A trace that records nothing."""

    is_recording = False
    _SILENCE = _Silence()

    def span(self, name: str, *, step: int) -> contextlib.AbstractContextManager[None]:
        """Runs the body and records nothing."""
        del name, step
        return self._SILENCE

    def add(self, name: str, begin_ns: int, end_ns: int, *, step: int, thread: ThreadName | None = None) -> None:
        """Does nothing."""

    def end_step(self, next_step: int) -> None:
        """Does nothing."""


class RecordedTrace:
    """A trace that keeps every span in memory, about 300 bytes each. Thread-safe.

    Args:
        rank: the rank of this worker, shown as the id of its process.
    """

    is_recording = True

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self._events: list[dict[str, Any]] = []
        self._rows: dict[int, str] = {}

    @contextlib.contextmanager
    def span(self, name: str, *, step: int) -> Iterator[None]:
        """Implements :meth:`Trace.span`."""
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(name, begin, time.perf_counter_ns(), step=step)

    def add(self, name: str, begin_ns: int, end_ns: int, *, step: int, thread: ThreadName | None = None) -> None:
        """Implements :meth:`Trace.add`."""
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
        """Does nothing: the spans stay until :meth:`events` is called."""

    def events(self) -> list[dict[str, Any]]:
        """Returns all spans so far as Trace Events, after the events that name the worker and its threads."""
        names = [("process_name", 0, f"worker {self._rank}")]
        names += [("thread_name", row, title) for row, title in list(self._rows.items())]
        metadata = [
            {"name": kind, "ph": "M", "pid": self._rank, "tid": row, "args": {"name": title}}
            for kind, row, title in names
        ]
        return [*metadata, *self._events]


def write_trace(path: Path, events: Sequence[dict[str, Any]]) -> None:
    """Writes the events of all workers to one JSON file.

    Args:
        path: the path of the file.
        events: Trace Events, such as :meth:`RecordedTrace.events` returns.
    """
    write_whole(path, json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"}))


def loaded(batches: Iterable[Item], trace: Trace, step_of: Callable[[], int]) -> Iterator[Item]:
    """Yields the items of ``batches``, and records a span ``load`` for each wait for an item.

    Args:
        batches: the batches to load.
        trace: the trace that receives the spans.
        step_of: returns the current step.
    """
    source = iter(batches)
    while True:
        with trace.span("load", step=step_of()):
            try:
                batch = next(source)
            except StopIteration:
                return
        yield batch


def trace_allreduce(model: DistributedDataParallel, trace: Trace, step_of: Callable[[], int]) -> None:
    """Records a span for each bucket that DDP reduces, from start to end; DDP's own reduction stays.

    Args:
        model: the model, which gets a communication hook.
        trace: the trace that receives the spans.
        step_of: returns the current step.
    """

    def reduce(group: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        step, begin = step_of(), time.perf_counter_ns()

        def end(reduced: torch.futures.Future[Tensor]) -> Tensor:
            row = (_NO_THREAD + bucket.index(), f"allreduce, bucket {bucket.index()}")
            trace.add("allreduce", begin, time.perf_counter_ns(), step=step, thread=row)
            return reduced.value()

        return allreduce_hook(group, bucket).then(end)

    reduce.__annotations__.clear()  # DDP compares them with its types, and this module's are text
    model.register_comm_hook(None, reduce)
