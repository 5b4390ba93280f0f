"""What ran when, on which thread, in the format that Perfetto and chrome://tracing open.

One span is one complete event ("ph": "X") of the Trace Event Format, times in microseconds of the wall clock; a job's
worker is a process, its threads are the rows. Spans of one thread nest.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol


class Trace(Protocol):
    """Where spans go."""

    def span(self, name: str, *, step: int) -> contextlib.AbstractContextManager[None]:
        """The body's time, as ``name`` of ``step``, on the calling thread."""
        ...


class _Silence:
    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class NoTrace:
    """Keeps nothing."""

    _SILENCE = _Silence()

    def span(self, name: str, *, step: int) -> contextlib.AbstractContextManager[None]:
        """Nothing but the body."""
        del name, step
        return self._SILENCE


class RecordedTrace:
    """Keeps every span in memory, about 300 bytes each. Thread-safe.

    Args:
        rank: of the worker.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()
        self._events: list[dict[str, Any]] = []
        self._threads: dict[int, str] = {}

    @contextlib.contextmanager
    def span(self, name: str, *, step: int) -> Iterator[None]:
        """See :class:`Trace`."""
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(name, begin, time.perf_counter_ns(), step=step)

    def add(self, name: str, begin_ns: int, end_ns: int, *, step: int) -> None:
        """A span of the calling thread that was timed with ``time.perf_counter_ns``."""
        thread = threading.current_thread()
        self._threads.setdefault(thread.native_id or 0, thread.name)
        event = {
            "name": name,
            "ph": "X",
            "ts": (begin_ns + self._epoch_ns) / 1000,
            "dur": (end_ns - begin_ns) / 1000,
            "pid": self._rank,
            "tid": thread.native_id or 0,
            "args": {"step": step},
        }
        self._events.append(event)  # atomic under the GIL

    def events(self) -> list[dict[str, Any]]:
        """All spans so far, after the names of worker and threads."""
        names = [("process_name", 0, f"worker {self._rank}")]
        names += [("thread_name", thread, name) for thread, name in list(self._threads.items())]
        metadata = [
            {"name": kind, "ph": "M", "pid": self._rank, "tid": thread, "args": {"name": name}}
            for kind, thread, name in names
        ]
        return [*metadata, *self._events]


def write_trace(path: Path, events: Sequence[dict[str, Any]]) -> None:
    """Writes the events of all workers as one file."""
    path.write_text(json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"}))
