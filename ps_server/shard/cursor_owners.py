"""The owners of this shard's cursors: a cursor belongs to the caller that shows the key given when it was opened.

A follower of the previous version asks for no key. Its cursor has no owner, so any caller may use it. Such a follower
cannot take over, acknowledge or close a cursor that has an owner. The classes belong to one event loop.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ...proto import control_pb2 as pb
from ...proto.errors import FailedPrecondition, ResourceExhausted

_KEY_BYTES = 16
MOST_CURSORS = 1024


@dataclass
class _Cursor:
    """An open cursor.

    Attributes:
        account: the account of its follower.
        key: the key that its owner shows; b"" when the cursor has no owner.
        idle_sec: the seconds without a call after which it ends.
        used_at: the time of its last call.
        tables: the ids of the tables that it follows; none: all.
        holds: whether a threshold holds rows back for it.
        acknowledged: the number of positions acknowledged since it was opened.
        figures: what its follower says of itself.
    """

    account: str
    key: bytes
    idle_sec: float
    used_at: float
    tables: tuple[int, ...] = ()
    holds: bool = False
    acknowledged: int = 0
    figures: pb.FollowerFigures = field(default_factory=pb.FollowerFigures)


class CursorOwners:
    """The open cursors, by name.

    Args:
        most: the bound on cursors of all accounts. An account has at most as many as are still free, so that a new
            follower always finds room.
        clock: returns monotonic time in seconds.
    """

    def __init__(self, most: int = MOST_CURSORS, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._cursors: dict[str, _Cursor] = {}

    def open(
        self,
        name: str,
        key: bytes,
        account: str,
        idle_sec: float,
        *,
        is_owned: bool,
        tables: Iterable[int] = (),
        holds: bool = False,
    ) -> bytes:
        """Opens a cursor, or opens a cursor of the same owner again.

        Args:
            name: the name of the cursor.
            key: the key that the caller received earlier; b"" when it has none.
            account: the account of the caller.
            idle_sec: the seconds without a call after which the cursor ends.
            is_owned: whether the caller will show a key.
            tables: the ids of the tables that it follows; none: all.
            holds: whether a threshold holds rows back for it, which become due by time.

        Returns:
            The key that the owner shows from now on.

        Raises:
            FailedPrecondition: the cursor is open and belongs to another follower.
            ResourceExhausted: the account has its full share of cursors.
        """
        self._drop_idle()
        known = self._cursors.get(name)
        if known is None:
            count = Counter(cursor.account for cursor in self._cursors.values())[account]
            free = self._most - len(self._cursors)
            if count + 1 > free - 1:
                raise ResourceExhausted(
                    f"cursors: {len(self._cursors)} are open on this shard, {count} by this follower's account; "
                    f"allowed: {self._most} in all, and for one account no more than stay free for others"
                )
        else:
            self._check(name, known, key)
        given = (key or secrets.token_bytes(_KEY_BYTES)) if is_owned else b""
        self._cursors[name] = _Cursor(account, given, idle_sec, self._clock(), tuple(tables), holds)
        return given

    def use(self, name: str, key: bytes, acknowledged: int = 0, figures: pb.FollowerFigures | None = None) -> int:
        """Notes a call, and returns how many positions were acknowledged since the cursor was opened, including these.

        Raises:
            FailedPrecondition: the cursor belongs to another follower.
        """
        cursor = self._cursors.get(name)
        if cursor is None:  # the store reports that it is not open
            return 0
        self._check(name, cursor, key)
        cursor.used_at = self._clock()
        cursor.acknowledged += acknowledged
        if figures is not None:
            cursor.figures = figures
        return cursor.acknowledged

    def following(self, most: int) -> list[tuple[str, tuple[int, ...], float, pb.FollowerFigures]]:
        """Returns name, tables, seconds since the last call, and what the follower says, of at most ``most`` cursors.

        Another thread may call it.
        """
        now = self._clock()
        cursors = sorted(dict(self._cursors).items())[:most]
        return [(name, each.tables, now - each.used_at, each.figures) for name, each in cursors]

    def tables(self, name: str) -> tuple[int, ...]:
        """Returns the ids of the tables that a cursor follows; none: all, or the cursor is not known."""
        cursor = self._cursors.get(name)
        return () if cursor is None else cursor.tables

    def holds(self, name: str) -> bool:
        """Returns whether a threshold holds rows back for a cursor."""
        cursor = self._cursors.get(name)
        return cursor is not None and cursor.holds

    def close(self, name: str, key: bytes) -> None:
        """Forgets a cursor; the call is harmless when it is not known.

        Raises:
            FailedPrecondition: the cursor belongs to another follower.
        """
        cursor = self._cursors.get(name)
        if cursor is not None:
            self._check(name, cursor, key)
            del self._cursors[name]

    @staticmethod
    def _check(name: str, cursor: _Cursor, key: bytes) -> None:
        if cursor.key and not hmac.compare_digest(cursor.key, key):
            raise FailedPrecondition(f"cursor {name!r} belongs to another follower; open a cursor of another name")

    def _drop_idle(self) -> None:
        now = self._clock()
        ended = [name for name, cursor in self._cursors.items() if now - cursor.used_at > cursor.idle_sec]
        for name in ended:
            del self._cursors[name]
