"""Bounds the rows in one unary gRPC reply, and charges the memory of replies to clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import InvalidArgument
from ..security.security import bearer_token
from .fair_memory import FairMemory

UNARY_REPLY_BYTES = 64 << 20
UNARY_MEMORY_BYTES = 1 << 30  # for the replies of all clients of one process
FEW_KEYS = 128  # the rows of so few keys fit at any dimension, and cost little
_KEY_BYTES = 12  # bytes of a row besides its values: version, found and answered
_COPIES = 3  # copies of a row's values: as rows, as bytes of a message, and as the message


class UnaryReplies:
    """The memory that the unary replies of one process take. It belongs to one event loop.

    Args:
        memory: the budget of all replies; None makes one of ``UNARY_MEMORY_BYTES``.
    """

    def __init__(self, memory: FairMemory | None = None) -> None:
        self._memory = FairMemory(UNARY_MEMORY_BYTES) if memory is None else memory

    async def charge(self, context: Any, asked: Mapping[str, tuple[int, int]]) -> None:
        """Charges a reply to the client of a call until the call has ended, before the reply is made.

        Args:
            context: the call, a ``grpc.aio.ServicerContext``.
            asked: (number of keys, dimension) by table.

        Raises:
            InvalidArgument: the reply would have more than ``UNARY_REPLY_BYTES``; the text says how many keys fit.
            Unavailable: there was no room within the wait of the budget.
        """
        count = sum(keys * _row_bytes(dim) for keys, dim in asked.values())
        if count > UNARY_REPLY_BYTES:
            fit = ", ".join(f"{UNARY_REPLY_BYTES // _row_bytes(dim)} of {table!r}" for table, (_, dim) in asked.items())
            raise InvalidArgument(
                f"keys: the reply would have {count} bytes; allowed: at most {UNARY_REPLY_BYTES}, which holds {fit}"
            )
        client = account_of(context)
        await self._memory.take(client, _COPIES * count)
        context.add_done_callback(lambda _: self._memory.give_back(client, _COPIES * count))


def _row_bytes(dim: int) -> int:
    return 4 * dim + _KEY_BYTES


def account_of(context: Any) -> str:
    """Returns the account of a gRPC call's client, which is charged for its memory: a token at an address."""
    host = str(context.peer()).rsplit(":", 1)[0]
    return f"{bearer_token(context.invocation_metadata())}@{host}"
