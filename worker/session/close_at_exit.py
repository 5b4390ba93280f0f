"""Closes the sessions that a script leaves open, when its process ends.

Without this, a script that ends well would keep its place in the job until its lease expires, and count as a fault.
Only the process that connected closes a session; a child of ``fork`` does not close its parent's sessions.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing.util
import os
import sys
import weakref
from typing import Protocol

from ...proto.errors import SparserowError
from .exit_code import fail_at_exit

_log = logging.getLogger(__name__)

EXIT_SEC = 5.0  # seconds that each session may take to leave its job


class EndsAtExit(Protocol):
    """An open session, as this module sees it."""

    def end_at_exit(self, error: BaseException | None, deadline_sec: float) -> None: ...


_connected: set[EndsAtExit] = set()  # sessions with a lease: they are kept alive until they are closed
_local: weakref.WeakSet[EndsAtExit] = weakref.WeakSet()  # sessions whose shards are in this process
_registered_in = 0  # the id of the process whose exit handlers are registered; 0: none is


def close_at_exit(session: EndsAtExit, *, is_connected: bool) -> None:
    """Registers ``session`` to be closed when this process ends.

    Args:
        session: the session to close.
        is_connected: whether the session has a lease in a cluster; such a session is kept alive until it is closed.
            A session over shards of this process is held weakly.
    """
    global _registered_in
    if _registered_in != os.getpid():
        _registered_in = os.getpid()
        _connected.clear()  # the sessions in it belong to the parent of a fork
        atexit.register(_end_all)
        # A child of multiprocessing does not run atexit handlers.
        multiprocessing.util.Finalize(None, _end_all, exitpriority=100)
    (_connected if is_connected else _local).add(session)


def forget_at_exit(session: EndsAtExit) -> None:
    """Removes a session that was closed from those to close when the process ends."""
    _connected.discard(session)
    _local.discard(session)


def _end_all() -> None:
    """Ends every open session. When all have ended, raises the first error about rows that were not trained.

    After such an error the process ends with a code other than 0.
    """
    error = _uncaught()
    failure: SparserowError | None = None
    for session in (*_connected, *_local):
        try:
            session.end_at_exit(error, EXIT_SEC)
        except SparserowError as raised:
            failure = failure or raised
        except Exception:
            _log.exception("closing a session when the process ends")
    _connected.clear()
    if failure is not None:
        fail_at_exit()
        raise failure


def _uncaught() -> BaseException | None:
    """Returns the error that ends this process; None when it ends well or runs an interactive interpreter."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        return error.__context__ if error.code else None
    if error is None and not hasattr(sys, "ps1"):
        return getattr(sys, "last_value", None)
    return error
