"""Closes the sessions that a script leaves open, when its process ends.

Without it a script that ends well would leave its job as one that died: by the end of its lease, as a fault.
Only the process that connected closes a session; a child of ``fork`` leaves its parent's alone.
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

EXIT_SEC = 5.0  # for leaving the job, of each session


class EndsAtExit(Protocol):
    """A session that is open."""

    def end_at_exit(self, error: BaseException | None, deadline_sec: float) -> None: ...


_connected: set[EndsAtExit] = set()  # kept alive, as their leases are renewed until they are closed
_local: weakref.WeakSet[EndsAtExit] = weakref.WeakSet()
_registered_in = 0  # the process


def close_at_exit(session: EndsAtExit, *, is_connected: bool) -> None:
    """Has ``session`` closed when this process ends; one that shards of this process serve is not kept alive."""
    global _registered_in
    if _registered_in != os.getpid():
        _registered_in = os.getpid()
        _connected.clear()  # after a fork: the parent's
        atexit.register(_end_all)
        # A child of multiprocessing ends without atexit.
        multiprocessing.util.Finalize(None, _end_all, exitpriority=100)
    (_connected if is_connected else _local).add(session)


def forget_at_exit(session: EndsAtExit) -> None:
    """After it was closed."""
    _connected.discard(session)
    _local.discard(session)


def _end_all() -> None:
    """Ends every open session; the first error about rows that were not trained is raised when all have ended.

    The process then ends with a code other than 0.
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
    """The error that ends this process; None where it ends well, or an interpreter was used by hand."""
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        return error.__context__ if error.code else None
    if error is None and not hasattr(sys, "ps1"):
        return getattr(sys, "last_value", None)
    return error
