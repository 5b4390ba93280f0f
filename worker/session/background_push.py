"""A background thread that sends the last phase of a commit while the next step runs."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

from ...cpp_ext import _client
from .commit_doubt import fenced_in_doubt
from .tracing import Trace


class BackgroundPush:
    """One thread that finishes commits, one at a time. All methods are called by the thread that trains.

    Every shard has prepared a commit before :meth:`send` gets it, so the commit is decided. A failure therefore means
    that its outcome is unknown; the next :meth:`wait` raises it.
    """

    def __init__(self, native: _client.NativeSession) -> None:
        self._native = native
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sparserow-push")
        self._pid = os.getpid()
        self._sent: Future[None] | None = None

    def send(self, trace: Trace) -> None:
        """Counts the prepared step as taken, and sends its commit in the background."""
        step = self._native.step
        self._native.begin_commit()
        try:
            self._sent = self._thread.submit(self._finish, trace, step)
        except RuntimeError:  # the interpreter is shutting down and starts no more threads
            self._finish(trace, step)

    def _finish(self, trace: Trace, step: int) -> None:
        with trace.span("push", step=step), fenced_in_doubt():
            self._native.finish_commit()

    def wait(self) -> None:
        """Waits until every shard has acknowledged the last commit. Each failure is raised once.

        Raises:
            DeadlineExceeded, Unavailable, ...: the outcome of the last commit is unknown.
        """
        if os.getpid() != self._pid:
            self._native.check_usable()  # raises, as the child of a fork cannot use the session
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.result()

    def close(self) -> None:
        """Waits for the last commit as :meth:`wait` does, with the same errors, and ends the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
