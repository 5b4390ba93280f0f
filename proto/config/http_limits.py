"""The limits that a server's HTTP endpoints set for their clients."""

from __future__ import annotations

from pydantic import Field, model_validator

from ..errors import InvalidArgument
from ..options.strict_model import Bytes, StrictModel

REQUEST_BYTES = 1 << 20  # bytes charged to every request, which bounds the number of small requests
BODY_FACTOR = 24  # bytes of Python objects for each byte of the worst JSON text that passes check_structure
REPLY_FACTOR = 4  # bytes of rows, Python objects and text for each byte of a reply's text


class HttpLimits(StrictModel):
    """The limits of one server's HTTP endpoints; ``client_connections`` applies to them as well."""

    connections: int = Field(512, ge=1, le=1 << 20, description="Open connections of all clients.")
    body_bytes: Bytes = Field(4 << 20, ge=1 << 10, description="Bytes of the body of one lookup.")
    reply_bytes: Bytes = Field(16 << 20, ge=1 << 10, description="Bytes of the reply to one lookup.")
    memory_bytes: Bytes = Field(
        256 << 20, description="Memory for bodies and replies of all clients; one client gets at most half of it."
    )
    head_sec: float = Field(
        15.0, gt=0, le=3600, description="Seconds from a new connection, or the last reply, to the end of the headers."
    )
    body_sec: float = Field(15.0, gt=0, le=3600, description="Seconds from the headers to the end of the body.")
    reply_sec: float = Field(30.0, gt=0, le=3600, description="Seconds that a client has to read its reply.")

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
        """Returns how many bytes of memory a request is charged for a body of ``length`` bytes."""
        return REQUEST_BYTES + BODY_FACTOR * length

    def reply_cost(self, length: int | None = None) -> int:
        """Returns how many bytes of memory a reply of ``length`` bytes is charged; None means the longest allowed
        reply.
        """
        return REQUEST_BYTES + REPLY_FACTOR * (self.reply_bytes if length is None else length)
