"""What the HTTP doors of a server let their clients hold."""

from __future__ import annotations

from pydantic import Field, model_validator

from ..errors import InvalidArgument
from .config import Bytes, StrictModel

REQUEST_BYTES = 1 << 20  # every request is charged this much, so that small ones have a bound on their number
BODY_FACTOR = 24  # Python's objects for the worst JSON that passes check_structure, in bytes for each byte of text
REPLY_FACTOR = 4  # rows, their Python objects and their text, in bytes for each byte of text


class HttpLimits(StrictModel):
    """The HTTP doors of one server; ``client_connections`` counts here too."""

    connections: int = Field(512, ge=1, le=1 << 20, description="Open connections of all clients.")
    body_bytes: Bytes = Field(4 << 20, ge=1 << 10, description="Bytes of the body of one lookup.")
    reply_bytes: Bytes = Field(16 << 20, ge=1 << 10, description="Bytes of the reply to one lookup.")
    memory_bytes: Bytes = Field(
        256 << 20, description="Memory for bodies and replies of all clients; one client gets at most half of it."
    )
    head_sec: float = Field(15.0, gt=0, le=3600, description="From a connection, or a reply, to a request's headers.")
    body_sec: float = Field(15.0, gt=0, le=3600, description="From the headers to the end of the body.")
    reply_sec: float = Field(30.0, gt=0, le=3600, description="In which a client has to read its reply.")

    @model_validator(mode="after")
    def _room_for_one(self) -> HttpLimits:
        for name, bytes_ in (("body_bytes", self.body_cost(self.body_bytes)), ("reply_bytes", self.reply_cost())):
            if 2 * bytes_ > self.memory_bytes:
                raise InvalidArgument(
                    f"memory_bytes: {self.memory_bytes} is too little for {name}; allowed: at least {2 * bytes_}"
                )
        return self

    @staticmethod
    def body_cost(length: int) -> int:
        """The memory that a request's body is charged, in bytes."""
        return REQUEST_BYTES + BODY_FACTOR * length

    def reply_cost(self, length: int | None = None) -> int:
        """The memory that a reply of ``length`` bytes is charged; None: the longest one."""
        return REQUEST_BYTES + REPLY_FACTOR * (self.reply_bytes if length is None else length)
