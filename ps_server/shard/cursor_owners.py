"""Owners of this shard's cursors: a cursor belongs to the caller that shows the number given when it was opened.

A follower of the version before asks for no number. Its cursor belongs to everybody, as then, but it cannot take over,
acknowledge or close one that has an owner. Belongs to one event loop.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ...proto.errors import FailedPrecondition, ResourceExhausted

_KEY_BYTES = 16
MOST_CURSORS = 1024


@dataclass
class _Cursor:
    """One that is open.

    Attributes:
        account: of its follower.
        key: that its owner shows; b"": everybody is its owner.
        idle_sec: without a call after which it ends.
        used_at: when it was last called for.
        acknowledged: positions since it was opened.
    """

    account: str
    key: bytes
    idle_sec: float
    used_at: float
    acknowledged: int = 0


class CursorOwners:
    """The cursors that are open, by name.

    Args:
        most: of all accounts. One account has at most as many as stay free for others, so a newcomer finds room.
        clock: monotonic seconds.
    """

    def __init__(self, most: int = MOST_CURSORS, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._cursors: dict[str, _Cursor] = {}

    def open(self, name: str, key: bytes, account: str, idle_sec: float, *, is_owned: bool) -> bytes:
        """Opens a cursor, or opens one of the same owner anew; returns the key that its owner shows from now on.

        Args:
            name: of the cursor.
            key: that the caller has from the time before; b"": none.
            account: of the caller.
            idle_sec: without a call after which it ends.
            is_owned: whether the caller will show a key.

        Raises:
            FailedPrecondition: it is open, and another follower's.
            ResourceExhausted: the account has its share of cursors.
        """
        self._drop_idle()
        known = self._cursors.get(name)
        if known is None:
            count = Counter(cursor.account for cursor in self._cursors.values())[account]
            free = self._most - len(self._cursors)
            if count + 1 > free - 1:
                raise ResourceExhausted(
                    f"cursors: {len(self._cursors)} are open on this shard, {count} by this follower's account; "
                    f"allowed: {self._most} in all, and for one no more than stay free for others"
                )
        else:
            self._check(name, known, key)
        given = (key or secrets.token_bytes(_KEY_BYTES)) if is_owned else b""
        self._cursors[name] = _Cursor(account, given, idle_sec, self._clock())
        return given

    def use(self, name: str, key: bytes, acknowledged: int = 0) -> int:
        """Notes a call; returns how many positions were acknowledged since the cursor was opened, with these.

        Raises:
            FailedPrecondition: the cursor is another follower's.
        """
        cursor = self._cursors.get(name)
        if cursor is None:  # the store says that it is not open
            return 0
        self._check(name, cursor, key)
        cursor.used_at = self._clock()
        cursor.acknowledged += acknowledged
        return cursor.acknowledged

    def close(self, name: str, key: bytes) -> None:
        """Forgets a cursor; harmless when it is not known.

        Raises:
            FailedPrecondition: it is another follower's.
        """
        cursor = self._cursors.get(name)
        if cursor is not None:
            self._check(name, cursor, key)
            del self._cursors[name]

    @staticmethod
    def _check(name: str, cursor: _Cursor, key: bytes) -> None:
        if cursor.key and not hmac.compare_digest(cursor.key, key):
            raise FailedPrecondition(f"cursor {name!r} belongs to another follower; open one of another name")

    def _drop_idle(self) -> None:
        now = self._clock()
        ended = [name for name, cursor in self._cursors.items() if now - cursor.used_at > cursor.idle_sec]
        for name in ended:
            del self._cursors[name]
