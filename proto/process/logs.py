"""Sets up the log of a server process: one line per event on stderr, plain or JSON.

``log.info(text, extra={"fields": {...}})`` adds members to the JSON form.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from ..config.log_config import LogConfig


class _PlainLine(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = f"{stamp}.{int(record.msecs):03d}Z {record.levelname.lower():7} {self._role}: {record.getMessage()}"
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


class _JsonLine(logging.Formatter):
    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "role": self._role,
            "logger": record.name,
            "message": record.getMessage(),
        }
        event |= getattr(record, "fields", {})
        if record.exc_info:
            event["traceback"] = self.formatException(record.exc_info)
        return json.dumps(event)


def start_log(role: str, config: LogConfig) -> None:
    """Sends the process's log to stderr.

    Args:
        role: the name of the process in every line, such as ``shard 1``.
        config: the format and the level of the log.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLine(role) if config.format == "json" else _PlainLine(role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.getLogger("grpc").setLevel(logging.WARNING)
