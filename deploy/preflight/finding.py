"""The result of a check of ``sparserow doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "absent", "warning", "wrong"]


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        area: what was checked. Of an installation it is a part: python, packages, Arrow, core, RocksDB, OpenSSL,
            io_uring, torch, CUDA, or "extra NAME"; else machine, config, ports, certificates, disk or cluster.
        level: "ok"; "absent" when a part that is not always needed is missing; "warning" when it works, but slower or
            for less long than it should; "wrong" when it will fail.
        text: what the check found.
        remedy: what to do; empty when the level is "ok".
    """

    area: str
    level: Level
    text: str
    remedy: str = ""
