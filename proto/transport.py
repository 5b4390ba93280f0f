"""How rows travel between a client and the servers that have them."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

Transport: TypeAlias = Literal["auto", "tcp", "shm"]
TRANSPORTS: tuple[str, ...] = get_args(Transport)
