"""Bounds the log lines that peers can cause."""

from __future__ import annotations

import logging
import threading
import time

_LINES = 5
_PERIOD_SEC = 10.0


class RateLimit(logging.Filter):
    """Lets a few lines of each kind through in a period, and says afterwards how many were left out.

    A kind is a message before its arguments are filled in. A refused request's traceback is cut: its cause stands in
    the line.

    Args:
        lines: of each kind in a period.
        period_sec: its length.
    """

    def __init__(self, lines: int = _LINES, period_sec: float = _PERIOD_SEC) -> None:
        super().__init__()
        self._lines = lines
        self._period_sec = period_sec
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}  # kind -> end of its period, lines in it; kinds are in the code

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is written."""
        cause = record.exc_info[1] if record.exc_info else None
        if getattr(cause, "code", 500) < 500:  # aiohttp's errors of a request have the status as their code
            name, what = type(cause).__name__, " ".join(str(cause).split())[:100]
            record.msg, record.args = "%s", (f"{record.getMessage()}: {name}: {what}",)
            record.exc_info, record.exc_text = None, None
            kind = "a malformed request"
        else:
            kind = str(record.msg)
        with self._lock:
            now = time.monotonic()
            end, count = self._kinds.get(kind, (0.0, 0))
            if now >= end:
                if count > self._lines:
                    record.msg = f"{record.msg} (%d such lines before it were left out)"
                    record.args = (*(record.args or ()), count - self._lines)
                end, count = now + self._period_sec, 0
            self._kinds[kind] = (end, count + 1)
            return count < self._lines
