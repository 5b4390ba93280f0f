"""The last phase of a commit, sent while the next step runs."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

from ...cpp_ext import _client
from .commit_doubt import fenced_in_doubt
from .tracing import Trace


class BackgroundPush:
    """One thread that finishes commits, one at a time. Its owner calls from the thread that trains.

    A commit gets here when every shard has prepared it, so it is decided: a failure means that its outcome is unknown,
    and is raised by the next :meth:`wait`.
    """

    def __init__(self, native: _client.NativeSession) -> None:
        self._native = native
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sparserow-push")
        self._pid = os.getpid()
        self._sent: Future[None] | None = None

    def send(self, trace: Trace) -> None:
        """Takes the prepared step: it counts as taken, and is sent in the background."""
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
        """Returns when the last commit is acknowledged everywhere; each failure is raised once.

        Raises:
            DeadlineExceeded, Unavailable, ...: its outcome is unknown.
        """
        if os.getpid() != self._pid:
            self._native.check_usable()  # says that a fork's child cannot use the session
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.result()

    def close(self) -> None:
        """As :meth:`wait`; then the thread ends."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
