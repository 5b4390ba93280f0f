"""Reads certificates and tokens again when their files change, in processes that serve and in those that call."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

from ..errors import SparserowError
from .security import Security, check_certificates, process_security, use_security

log = logging.getLogger(__name__)

_LOOK_SEC = 1.0


class FreshSecurity:
    """An identity as its files have it now. Thread-safe.

    Files that cannot be read, or are refused, are logged; the ones before stay in force until they can be.

    Args:
        security: the identity; None stands for that of the process, whichever it is.

    Attributes:
        problem: why the files are not in force as they are now; empty when they are.
    """

    def __init__(self, security: Security | None) -> None:
        self._own = security
        self._lock = threading.Lock()
        self._seen: tuple[tuple[int, ...], ...] | None = None  # None: a change since they were read is found too
        self._looked_at = -math.inf
        self._users: list[Callable[[Security], None]] = []
        self.problem = ""

    @property
    def now(self) -> Security:
        """The identity, as it was when the files could be read last."""
        return process_security() if self._own is None else self._own

    @contextlib.contextmanager
    def given_to(self, use: Callable[[Security], None]) -> Iterator[None]:
        """Gives ``use`` each new identity, for the duration of the block, before others see it.

        Args:
            use: receives it, in any thread. When it raises, the previous files stay in force.
        """
        with self._lock:
            self._users.append(use)
        try:
            yield
        finally:
            with self._lock:
                self._users.remove(use)

    def look(self) -> None:
        """Reads the files again when they have changed, at most once a second; none where another thread does."""
        if not self._lock.acquire(blocking=False):  # a folder that hangs holds up one thread, and no heartbeats
            return
        try:
            moment = time.monotonic()
            before = self.now
            if before.path is None or moment - self._looked_at < _LOOK_SEC:
                return
            self._looked_at = moment
            stamps = _stamps(before)
            if stamps == self._seen:
                return
            self._seen = stamps  # taken before the files are read, so that a change meanwhile is found
            try:
                security = Security.load(before.path)
                if security != before:
                    check_certificates(security)
                    for use in self._users:
                        use(security)
            except (SparserowError, OSError) as error:
                self._seen = None  # what was wrong may be mended without a change of these files
                if str(error) != self.problem:
                    log.error("security: the previous files stay in force: %s", error)
                self.problem = str(error)
                return
            self.problem = ""
            if security == before:
                return
            if self._own is None:
                use_security(security)
            else:
                self._own = security
            if security.files != before.files:
                self._seen = None
            log.info("security: the files were read again")
        finally:
            self._lock.release()


_of_process = FreshSecurity(None)


def fresh(security: FreshSecurity | Security | None = None) -> FreshSecurity:
    """Returns ``security`` so that it follows its files; None stands for the identity of the process."""
    if security is None:
        return _of_process
    return security if isinstance(security, FreshSecurity) else FreshSecurity(security)


@contextlib.asynccontextmanager
async def fresh_security(on_change: Callable[[Security], None] = lambda _: None) -> AsyncIterator[None]:
    """Reads the process's security files again when they have changed, for the duration of the block.

    Args:
        on_change: as for :meth:`FreshSecurity.given_to`.
    """
    with _of_process.given_to(on_change):
        task = asyncio.get_running_loop().create_task(_keep_looking())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _keep_looking() -> None:
    while True:
        await asyncio.sleep(_LOOK_SEC)
        await asyncio.to_thread(_of_process.look)


def _stamps(security: Security) -> tuple[tuple[int, ...], ...]:
    """Returns stamps that change when a file does, also when a link or the folder of a mounted secret is exchanged."""
    stamps = []
    for path in security.files:
        try:
            info = path.stat()
            stamps.append((info.st_mtime_ns, info.st_ctime_ns, info.st_size, info.st_ino))
        except OSError:
            stamps.append((0, 0, 0, 0))
    return tuple(stamps)
