"""The connection of the coordinator to the process that has a shard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from ....proto import control_pb2_grpc as pb_grpc
from ....proto.errors import SparserowError, Unavailable
from ....proto.grpc_status import error_of_status
from ....proto.security.channels import AioSecureChannel

CALL_DEADLINE_SEC = 5.0


class ShardLink:
    """The connection to the process that has a shard; a new one is made when another process replaces it.

    Attributes:
        instance: the random number of the process.
        lock: held during a message, so that the shard receives one message at a time.
    """

    def __init__(self, instance: int, address: tuple[str, int], index: int) -> None:
        self.instance = instance
        self.lock = asyncio.Lock()
        self._peer = f"shard {index} at {address[0]}:{address[1]}"
        self._channel = AioSecureChannel(f"{address[0]}:{address[1]}")
        self._stub: Any = pb_grpc.ShardStub(self._channel)

    async def call(self, method: str, request: Any, deadline_sec: float | None = CALL_DEADLINE_SEC) -> Any:
        """Makes one call and returns its reply; raises errors of the taxonomy.

        Args:
            method: the name of the method in the Shard service.
            request: the message to send.
            deadline_sec: the deadline in seconds; None means no deadline.
        """
        try:
            return await getattr(self._stub, method)(request, timeout=deadline_sec)
        except grpc.RpcError as error:
            raise self._error_of(error) from None

    async def stream(self, method: str, request: Any) -> AsyncIterator[Any]:
        """Yields the replies of a call with many replies; the call ends with the shard, or when its reader stops."""
        try:
            async for reply in getattr(self._stub, method)(request):
                yield reply
        except grpc.RpcError as error:
            raise self._error_of(error) from None

    def _error_of(self, error: grpc.RpcError) -> SparserowError:
        failure = error_of_status(error, self._peer)
        if failure.code == "PermissionDenied":  # while tokens change, each process reads the files at its own second
            return Unavailable(f"{self._peer} refuses the token of this coordinator: {failure}")
        return failure

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close()
