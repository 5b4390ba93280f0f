"""Reads certificates and tokens again when they change while a server runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from ..errors import SparserowError
from .security import Security, process_security, use_security

log = logging.getLogger(__name__)

_LOOK_SEC = 1.0


@contextlib.asynccontextmanager
async def fresh_security(on_change: Callable[[Security], None] = lambda _: None) -> AsyncIterator[Security]:
    """Reads the process's security files again when they have changed, for the duration of the block.

    Files that cannot be read, or are refused, are logged and tried again.

    Args:
        on_change: receives the new security in the event loop. When it raises, the previous files stay in force.
    """
    shown = process_security()
    if shown.path is None:
        yield shown
        return
    task = asyncio.get_running_loop().create_task(_keep_fresh(on_change))
    try:
        yield shown
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _keep_fresh(on_change: Callable[[Security], None]) -> None:
    seen = None  # None: a change between the process's start and now is found as well
    while True:
        await asyncio.sleep(_LOOK_SEC)
        before = process_security()
        if before.path is None:
            continue
        stamps = await asyncio.to_thread(_stamps, before)
        if stamps == seen:
            continue
        seen = stamps  # taken before the files are read, so that a change meanwhile is found
        try:
            security = await asyncio.to_thread(Security.load, before.path)
            if security == before:
                continue
            on_change(security)
        except SparserowError as error:
            log.error("security: the previous files stay in force: %s", error)
            continue
        use_security(security)
        if security.files != before.files:
            seen = None
        log.info("security: the files were read again")


def _stamps(security: Security) -> tuple[tuple[int, int, int], ...]:
    """Returns stamps that change when a file does, also when a link or the folder of a mounted secret is exchanged."""
    stamps = []
    for path in security.files:
        try:
            info = path.stat()
            stamps.append((info.st_mtime_ns, info.st_size, info.st_ino))
        except OSError:
            stamps.append((0, 0, 0))
    return tuple(stamps)
