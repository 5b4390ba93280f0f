"""How a server process writes its log."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..options.strict_model import StrictModel


class LogConfig(StrictModel):
    """How a server process writes its log to stderr."""

    format: Literal["plain", "json"] = Field("plain", description="One plain or one JSON line per event.")
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest severity that is written.")
