"""Ranks wait for each other before a collective call that some of them reach much later than others.

torch ends a collective call after one constant time. What one rank does alone, such as statistics of all data or a
publication of terabytes, has no such bound: so the others wait in the store of the process group, as long as the rank
that works gives signs of life there, and say what they wait for.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...proto.errors import DeadlineExceeded, Unavailable
from ...proto.process.lone_work import lone_work
from .join import collective_device

_log = logging.getLogger(__name__)

DEFAULT_TIMEOUT = timedelta(minutes=30)
_BEAT_SEC = 2.0
_FIRST_POLL_SEC, _LAST_POLL_SEC = 0.001, 0.25
_LOOK_SEC = 5.0  # between two looks at the signs of life
_LOG_SEC = 60.0  # between two lines of the log
_LEFT = "left"  # which rank has left the group by an error, and why
_SIGN = "sign"  # of the rank that has given one last, so that it costs the same at any number of ranks


class RankBeats:
    """The meetings of the ranks of one process group, and the signs of life of those that work alone.

    Args:
        store: the store of the group.
        rank, world: this rank, and the number of ranks.
        timeout: how long a rank that others wait for may give no sign of life.
    """

    def __init__(self, store: Any, rank: int, world: int, timeout: timedelta) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._silence_sec = timeout.total_seconds()
        self._number = 0
        self._beats = 0
        self._lock = threading.Lock()
        self._working = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        lone_work.watch(self._note)

    def end(self) -> None:
        """Ends the signs of life."""
        lone_work.forget(self._note)
        self._ended.set()
        self._working.set()
        if self._thread is not None:
            self._thread.join(_BEAT_SEC)

    def leave(self, error: BaseException) -> None:
        """Notifies the others that this rank comes to no further meeting."""
        with contextlib.suppress(Exception):  # the store may have ended
            self._store.set(_LEFT, f"rank {self._rank} has left: {type(error).__name__}: {str(error)[:500]}")

    def _note(self, is_on: bool) -> None:
        if is_on and self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="sparserow-rank-beats", daemon=True)
            self._thread.start()
        (self._working.set if is_on else self._working.clear)()

    def _beat(self) -> None:
        while True:
            self._working.wait()
            if self._ended.wait(_BEAT_SEC):
                return
            if self._working.is_set():
                self._beats += 1
                try:
                    self._store.set(_SIGN, f"rank {self._rank}\n{lone_work.words}\n{self._beats}")
                except Exception as error:  # the group has ended, or its store has
                    _log.debug("no sign of life could be given: %s", error)
                    return

    def meet(self, what: str) -> None:
        """Returns when every rank has called it as often as this one.

        Args:
            what: what the ranks meet for, which begins the text of an error.

        Raises:
            DeadlineExceeded: a rank that has not come gives no sign of life; the text says what it did last.
        """
        self._number += 1
        number, store = self._number, self._store
        if store.add(f"count/{number}", 1) == self._world:
            store.set(f"all/{number}", "")
            if number > 1:  # all have left the meeting before, as they have come to this one
                for key in (f"all/{number - 1}", f"count/{number - 1}"):
                    store.delete_key(key)
            return
        with self._silent():
            self._wait(what, number)

    def _wait(self, what: str, number: int) -> None:
        began = looked_at = logged_at = heard_at = time.monotonic()
        sign, pause = "", _FIRST_POLL_SEC
        while not self._store.check([f"all/{number}"]):
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL_SEC)
            now = time.monotonic()
            if now - looked_at < min(_LOOK_SEC, self._silence_sec / 4):
                continue
            looked_at = now
            newest = self._store.get(_SIGN).decode() if self._store.check([_SIGN]) else ""
            if newest != sign:
                sign, heard_at = newest, now
            rank, _, work = sign.rpartition("\n")[0].partition("\n")
            said = f"; {rank} was at: {work}" if sign else ""
            if self._store.check([_LEFT]):
                raise Unavailable(f"{what}: {self._store.get(_LEFT).decode()}")
            if now - heard_at > self._silence_sec:
                absent = self._world - int(self._store.add(f"count/{number}", 0))
                raise DeadlineExceeded(
                    f"{what}: {absent} of {self._world} ranks have not come, and none of them has given a sign of life "
                    f"for {self._silence_sec:g} s{said}"
                )
            if now - logged_at > _LOG_SEC:
                logged_at = now
                _log.info("%s: waiting since %.0f s%s", what, now - began, said)

    @contextlib.contextmanager
    def _silent(self) -> Iterator[None]:
        """Gives no signs of life meanwhile, as a rank that waits is none that others wait for."""
        was_working = self._working.is_set()
        self._working.clear()
        try:
            yield
        finally:
            if was_working and lone_work.words:
                self._working.set()


_made: list[tuple[Any, RankBeats]] = []  # of the default process group, which a program may make anew


def _beats() -> RankBeats | None:
    """Returns the meetings of the default process group; None where this process has none, or is its only rank."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    group: Any = dist.group.WORLD
    if not _made or _made[0][0] is not group:
        end_beats()
        inner = dist.distributed_c10d._get_default_store()
        store = dist.PrefixStore(f"sparserow/{group.group_name}", inner)  # type: ignore[attr-defined]
        timeout = timeout_of_default_group() or DEFAULT_TIMEOUT
        _made.append((group, RankBeats(store, dist.get_rank(), dist.get_world_size(), timeout)))
    return _made[0][1]


def end_beats() -> None:
    """Ends the signs of life of the process group that there was."""
    while _made:
        _made.pop()[1].end()


def leave_group(error: BaseException) -> None:
    """Notifies the other ranks, which may wait for this one, that it ends by an error."""
    for _, beats in _made:
        beats.leave(error)


def give_signs() -> None:
    """Lets this rank give signs of life while it works alone; every rank calls it before the first meeting."""
    _beats()


def meet(what: str) -> None:
    """Returns when every rank of the default process group has called it; each call is one of all ranks.

    A rank that comes late is waited for as long as one that works alone (proto/process/lone_work.py) gives signs of
    life, and the group's own timeout beyond.

    Args:
        what: what the ranks meet for, which begins the text of an error.

    Raises:
        DeadlineExceeded: a rank has not come; the text says what was heard last.
        Unavailable: a rank has left by an error; the text has it.
    """
    beats = _beats()
    if beats is not None:
        beats.meet(what)


def timeout_of_default_group() -> timedelta | None:
    """Returns the timeout that ``init_process_group`` was given; None where this torch does not show it."""
    group: Any = dist.group.WORLD
    options = getattr(group._get_backend(collective_device()), "options", None)
    return getattr(options, "_timeout", None)
