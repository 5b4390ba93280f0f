"""Waits for what a worker of a lower rank makes for all, where the workers have no process group to meet in."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from .session_parts import NamespaceCore

Value = TypeVar("Value")

_log = logging.getLogger(__name__)
_POLL_SEC = 0.2
_LOG_SEC = 60.0


def from_lower_rank(core: NamespaceCore, found: Callable[[], Value | None], what: str) -> Value | None:
    """Returns what a lower rank has made; None: no worker of a lower rank is about to, so this one is to make it.

    It is waited for as long as such a worker is in the job and has not taken its first step: the document that it wrote
    may be gone by then, with a shard that came back from an older checkpoint or with a table that was dropped.

    Args:
        core: the session of this worker.
        found: returns what was made; None: it is not there yet.
        what: what is waited for, which is logged each minute.

    Raises:
        Unavailable: the coordinator cannot be reached.
    """
    began = logged_at = time.monotonic()
    while core.lower_rank_begins():
        value = found()
        if value is not None:
            return value
        if time.monotonic() - logged_at > _LOG_SEC:
            logged_at = time.monotonic()
            _log.info("waiting since %.0f s for a lower rank: %s", logged_at - began, what)
        time.sleep(_POLL_SEC)
    return None
