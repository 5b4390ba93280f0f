"""Bounds the number of log lines that peers can cause."""

from __future__ import annotations

import logging
import threading
import time

_LINES = 5
_PERIOD_SEC = 10.0
_MOST_KINDS = 1024


class RateLimit(logging.Filter):
    """A log filter that passes a few lines of each kind per period, and then reports how many it dropped.

    The kind of a line is its attribute ``kind``, or else its message before the arguments are filled in. The traceback
    of a refused request is removed, because the line already has its cause.

    Args:
        lines: the number of lines of each kind that pass in a period.
        period_sec: the length of a period, in seconds.
    """

    def __init__(self, lines: int = _LINES, period_sec: float = _PERIOD_SEC) -> None:
        super().__init__()
        self._lines = lines
        self._period_sec = period_sec
        self._lock = threading.Lock()
        self._full_until = 0.0  # until then nothing is forgotten
        self._kinds: dict[object, tuple[float, int]] = {}  # by kind: the end of its period, and the lines in it

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether the line is written."""
        cause = record.exc_info[1] if record.exc_info else None
        if getattr(cause, "code", 500) < 500:  # aiohttp's request errors have the HTTP status in `code`
            name, what = type(cause).__name__, " ".join(str(cause).split())[:100]
            record.msg, record.args = "%s", (f"{record.getMessage()}: {name}: {what}",)
            record.exc_info, record.exc_text = None, None
            kind = "a malformed request"
        else:
            kind = getattr(record, "kind", None) or str(record.msg)
        with self._lock:
            now = time.monotonic()
            if len(self._kinds) >= _MOST_KINDS and kind not in self._kinds:
                if now >= self._full_until:
                    self._kinds = {known: entry for known, entry in self._kinds.items() if now < entry[0]}
                    self._full_until = now + self._period_sec
                kind = kind if len(self._kinds) < _MOST_KINDS else "of very many kinds"
            end, count = self._kinds.get(kind, (0.0, 0))
            if now >= end:
                if count > self._lines:
                    record.msg = f"{record.msg} (%d such lines before it were left out)"
                    record.args = (*(record.args or ()), count - self._lines)
                end, count = now + self._period_sec, 0
            self._kinds[kind] = (end, count + 1)
            return count < self._lines
