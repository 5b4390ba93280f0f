"""The times of a stream's events: which are late, how far a part has come, and which parts wait for others."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from .events import PartEvents

_MICROSECONDS = 1_000_000


@dataclass(frozen=True)
class EventTimes:
    """What the times of some events of a part say.

    Attributes:
        reached: the latest of them that is not too far ahead, microseconds since 1970 in UTC; None: there is none.
        late: the number of events before the watermark.
        ahead: the number of events too far ahead of the clock.
    """

    reached: int | None = None
    late: int = 0
    ahead: int = 0


class EventClock:
    """Follows the times of the parts that a worker reads.

    Args:
        max_ahead: how far ahead of the clock a time may lie that moves the watermark, in seconds.
        idle_after: how long a part has no event, and none that is left to read, until the watermark does not wait for
            it, in seconds.
        max_skew: how far a part may be read ahead of the watermark, in seconds; None: any time.

    Attributes:
        watermark: the time up to which all workers have read all parts; None: not known yet.
    """

    def __init__(self, *, max_ahead: float, idle_after: float, max_skew: float | None) -> None:
        self._max_ahead, self._idle_after, self._max_skew = max_ahead, idle_after, max_skew
        self.watermark: int | None = None
        self._reached: dict[str, int] = {}
        self._heard: dict[str, float] = {}  # when a part last had an event, or was opened

    def open(self, part: str) -> None:
        """Begins to follow a part."""
        self._heard[part] = time.monotonic()

    def close(self, part: str) -> None:
        """Follows a part no further."""
        self._heard.pop(part, None)
        self._reached.pop(part, None)

    def note(self, piece: PartEvents) -> None:
        """Notes events that were read; they are not committed yet."""
        if piece.part in self._heard and len(piece.ends):
            self._heard[piece.part] = time.monotonic()
            reached = self.times_of(piece).reached
            if reached is not None:
                self._reached[piece.part] = max(reached, self._reached.get(piece.part, reached))

    def times_of(self, piece: PartEvents) -> EventTimes:
        """Returns what the times of events say, by the clock and the watermark of now."""
        times = piece.lines.times
        if times is None or not len(times):
            return EventTimes()
        is_ahead = times > (time.time() + self._max_ahead) * _MICROSECONDS
        known = times[~is_ahead]
        late = 0 if self.watermark is None else int((known < self.watermark).sum())
        return EventTimes(int(known.max()) if len(known) else None, late, int(is_ahead.sum()))

    def idle(self, lags: Mapping[str, int]) -> list[str]:
        """Returns the parts for which the watermark does not wait.

        Args:
            lags: how many events of each part are not read yet; those that it lacks have none.
        """
        now = time.monotonic()
        return [part for part, heard in self._heard.items() if now - heard > self._idle_after and not lags.get(part, 0)]

    def waiting(self) -> Collection[str]:
        """Returns the parts that have come too far ahead of the others to be read on."""
        if self._max_skew is None or self.watermark is None:
            return ()
        most = self.watermark + self._max_skew * _MICROSECONDS
        return [part for part, reached in self._reached.items() if reached > most]
