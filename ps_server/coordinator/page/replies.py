"""The JSON replies of the page: one reading and one reply for all viewers of the same rights, at most once a second."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from ....proto import control_pb2 as pb
from ....proto.errors import ResourceExhausted, SparserowError, Unavailable
from ....proto.process.log_rate import RateLimit
from ....proto.status.cluster_status import document_of, view_of
from ....proto.status.namespaces import visible_to
from .history import EVERY_SEC, ClusterHistory

log = logging.getLogger(__name__)
log.addFilter(RateLimit())

MOST_REPLY_BYTES = 16 << 20
_LEAST_SEC = 1.0  # between two readings, and between two replies of the same rights
_MOST_SEC = 10.0
_SHARE = 0.05  # of a core that making replies may take
_READ_SEC = 15.0  # beyond the deadline of a call to a shard
_MOST_SCOPES = 32  # sets of namespaces whose replies are kept

Scope = tuple[str, ...] | None


@dataclass(frozen=True)
class _Reading:
    """A status, and when it was read on the clock of the replies."""

    status: pb.GetStatusReply
    at: float


@dataclass(frozen=True)
class PageReply:
    """A reply as bytes: the text, and the same compressed."""

    plain: bytes
    packed: bytes


class PageReplies:
    """Makes the replies of one page. It belongs to one event loop; figures and texts are made in threads.

    Args:
        read: returns the status of all namespaces.
        shards: the number of shards of the cluster.
        coordinator: ``HOST:PORT`` of the coordinator, which the page puts into commands.
        clock: returns monotonic time in seconds.

    Attributes:
        history: the series of the last hour.
        made: the number of replies that were made.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[pb.GetStatusReply]],
        *,
        shards: int,
        coordinator: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.history = ClusterHistory(shards)
        self.made = 0
        self._read = read
        self._lock = threading.Lock()  # of the history, which threads read and add to
        self._coordinator = coordinator
        self._clock = clock
        self._before: _Reading | None = None
        self._last: _Reading | None = None
        self._reading: asyncio.Task[_Reading] | None = None
        self._series: dict[Scope, tuple[int, str]] = {}  # by scope: the number of samples, and the text of their series
        self._kept: dict[Scope, tuple[float, PageReply]] = {}  # by scope: until when, and the reply
        self._making: dict[Scope, asyncio.Task[PageReply]] = {}

    async def reply(self, namespaces: Scope) -> PageReply:
        """Returns the reply for viewers of some namespaces; None means all.

        Raises:
            Unavailable: the status could not be read in time, or another coordinator leads.
            ResourceExhausted: the reply would have more than ``MOST_REPLY_BYTES``.
        """
        scope = None if namespaces is None else tuple(sorted(set(namespaces)))
        until, kept = self._kept.get(scope, (0.0, None))
        if kept is not None and self._clock() < until:
            return kept
        making = self._making.get(scope)
        if making is None:
            making = self._making[scope] = asyncio.get_running_loop().create_task(self._make(scope))
            making.add_done_callback(lambda done: self._end(scope, done))
        return await asyncio.shield(making)

    async def sample_forever(self) -> None:
        """Adds a point to the series every ``EVERY_SEC`` seconds."""
        loop, before = asyncio.get_running_loop(), None
        due = loop.time()
        while True:
            before = await self.sample(before)
            due = max(due + EVERY_SEC, loop.time())
            await asyncio.sleep(due - loop.time())

    async def sample(self, before: _Reading | None) -> _Reading | None:
        """Adds a point to the series, with the rates since the sample before, and returns what it read."""
        try:
            now = await self._read_once()
        except SparserowError as error:
            log.info("the page has a gap: %s", error)
            with self._lock:
                self.history.add(None)
            return None
        seconds = 0.0 if before is None else now.at - before.at
        earlier = None if before is None else before.status
        await asyncio.to_thread(self._add_sample, earlier, now.status, seconds)
        return now

    def _add_sample(self, before: pb.GetStatusReply | None, now: pb.GetStatusReply, seconds: float) -> None:
        view = view_of(before, now, seconds)
        with self._lock:
            self.history.add(view)

    def _end(self, scope: Scope, done: asyncio.Task[PageReply]) -> None:
        self._making.pop(scope, None)
        if not done.cancelled():
            done.exception()  # because a viewer that has gone asks for no result

    async def _make(self, scope: Scope) -> PageReply:
        began = self._clock()
        now = await self._read_once()
        before = self._before
        reply, cpu_sec = await asyncio.to_thread(self._reply_of, scope, before, now)
        self.made += 1
        pause = min(_MOST_SEC, max(_LEAST_SEC, cpu_sec / _SHARE))
        self._kept.pop(scope, None)
        self._kept[scope] = began + pause, reply
        for oldest in list(self._kept)[:-_MOST_SCOPES]:
            del self._kept[oldest]
            self._series.pop(oldest, None)
        return reply

    def _reply_of(self, scope: Scope, before: _Reading | None, now: _Reading) -> tuple[PageReply, float]:
        """Returns a reply, and the seconds of CPU that it took."""
        began = time.thread_time()
        seconds = 0.0 if before is None else now.at - before.at
        earlier = None if before is None else visible_to(before.status, scope)
        status = document_of(view_of(earlier, visible_to(now.status, scope), seconds))
        head = json.dumps({"coordinator": self._coordinator, "namespaces": scope, "status": status})
        plain = f'{head[:-1]}, "series": {self._series_of(scope)}}}'.encode()
        if len(plain) > MOST_REPLY_BYTES:
            raise ResourceExhausted(
                f"the status has {len(plain):,} bytes, and the page shows at most {MOST_REPLY_BYTES:,}; "
                "`sparserow status --json -` shows it whole"
            )
        return PageReply(plain, gzip.compress(plain, compresslevel=1)), time.thread_time() - began

    def _series_of(self, scope: Scope) -> str:
        """Returns the text of the series, which changes with each sample alone."""
        samples, text = self._series.get(scope, (-1, ""))
        with self._lock:
            if samples == self.history.samples:
                return text
            samples, document = self.history.samples, self.history.to_document(scope)
        text = json.dumps(document)
        self._series[scope] = samples, text
        return text

    async def _read_once(self) -> _Reading:
        """Returns a reading that is at most a second old; all who wait for one wait for the same."""
        if self._reading is None:
            if self._last is not None and self._clock() - self._last.at < _LEAST_SEC:
                return self._last
            self._reading = asyncio.get_running_loop().create_task(self._read_now())
        return await asyncio.shield(self._reading)

    async def _read_now(self) -> _Reading:
        try:
            status = await asyncio.wait_for(self._read(), _READ_SEC)
        except TimeoutError:
            raise Unavailable(f"the status could not be read within {_READ_SEC:.0f} s") from None
        finally:
            self._reading = None
        self._before, self._last = self._last, _Reading(status, self._clock())
        return self._last
