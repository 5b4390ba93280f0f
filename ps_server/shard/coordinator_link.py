"""A shard's side of its lease: it claims its place, says where it serves, and keeps saying that it lives."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from ...proto import control_pb2 as pb, control_pb2_grpc as pb_grpc
from ...proto.coordinators import ELECTION_SEC, Addresses
from ...proto.errors import DeadlineExceeded, FailedPrecondition, NotFound, SparserowError, Unavailable
from ...proto.grpc_status import error_of_status
from ...proto.security.security import open_aio_channel

log = logging.getLogger(__name__)

CALL_DEADLINE_SEC = 5.0
_BEATS_PER_LEASE = 5
_PAUSE_SEC = 0.1
_ASK_SEC = 1.0  # between asks for a place that may come free
_LONGEST_WAIT_SEC = 600.0  # for such a place; then the process ends with the reason, and its supervisor starts another


@dataclass(frozen=True)
class Registration:
    """What the coordinator gave to this process; all but the lineage is fixed for its life."""

    cluster_id: int
    slot_count: int
    lineage: int

    @property
    def identity(self) -> tuple[int, int]:
        """What is fixed."""
        return self.cluster_id, self.slot_count


class CoordinatorLink:
    """The connection of one shard to its coordinator. Belongs to one event loop.

    Args:
        coordinator: ``HOST:PORT``; of several of which one leads, all of them with commas.
        shard: the index that this process wants.
        control: (host, port) of its own Shard service.

    Attributes:
        lost: says which commits this process lacks; each heartbeat after a change tells them.
    """

    def __init__(self, coordinator: str, shard: int, control: tuple[str, int]) -> None:
        self.lost: Callable[[], list[pb.LostRange]] = list
        self._told_lost: list[pb.LostRange] = []
        self._addresses = Addresses(coordinator, what="--coordinator")
        self._shard = shard
        self._instance = secrets.randbits(63) + 1
        self._control = pb.Address(host=control[0], port=control[1])
        self._data: pb.Address | None = None
        self._place: Registration | None = None
        self._lease_sec = 10.0
        self._draining = False
        self._channels = {each: open_aio_channel(each) for each in self._addresses.all}
        self._stubs: dict[str, Any] = {each: pb_grpc.CoordinatorStub(it) for each, it in self._channels.items()}

    async def close(self) -> None:
        """Ends the connections."""
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    @property
    def _peer(self) -> str:
        return f"coordinator {self._addresses.now}"

    async def register(self) -> Registration:
        """Claims the shard, or claims it again from a restarted coordinator. Waits, for 10 minutes at most, while the
        process that has the place is silent, or the job ends that is in the way.

        Raises:
            Unavailable: the coordinator cannot be reached.
            FailedPrecondition, InvalidArgument: it refuses, or the process that has the place has renewed its lease.
        """
        request = pb.RegisterShardRequest(
            shard=self._shard,
            instance=self._instance,
            control=self._control,
            cluster_id=self._place.cluster_id if self._place is not None else 0,
            pid=os.getpid(),
            can_wait=self._place is None,  # one that has rows and was replaced does not wait
        )
        self._told_lost = []  # a coordinator that was started anew may not know them
        reply = await self._call("RegisterShard", request)
        if reply.HasField("wait"):
            reply = await self._wait_for_place(request, reply.wait)
        place = Registration(reply.cluster_id, reply.slot_count, reply.lineage)
        # The lineage is raised by a restore, which tells it to this process itself.
        if self._place is not None and self._place.identity != place.identity:
            raise FailedPrecondition(f"{self._peer} gave {place} and before that {self._place}; restart this shard")
        self._place, self._lease_sec = place, reply.lease_sec
        return place

    async def _wait_for_place(self, request: pb.RegisterShardRequest, wait: pb.ShardWait) -> pb.RegisterShardReply:
        """Asks again until the place is given; a coordinator that cannot be reached meanwhile is asked again too."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _LONGEST_WAIT_SEC
        said: set[bool] = set()
        while True:
            is_taken = wait.holder_pid != 0
            if is_taken not in said:
                log.warning("%s; this process waits for the place", wait.reason)
            said.add(is_taken)
            await asyncio.sleep(_ASK_SEC)
            try:
                reply = await self._call("RegisterShard", request)
            except (Unavailable, DeadlineExceeded) as error:
                if loop.time() > deadline:
                    raise
                log.info("%s; it is asked again", error)
                continue
            if not reply.HasField("wait"):
                return reply
            is_same = reply.wait.holder_pid == wait.holder_pid
            is_renewed = is_same and reply.wait.holder_renewals > wait.holder_renewals
            if is_renewed or loop.time() > deadline:
                raise FailedPrecondition(reply.wait.reason)
            wait = reply.wait

    def serve_at(self, host: str, port: int) -> None:
        """From the next heartbeat on the coordinator knows where the data plane listens."""
        self._data = pb.Address(host=host, port=port)

    def drain(self) -> None:
        """From the next heartbeat on the coordinator knows that this shard is stopping."""
        self._draining = True

    async def beat(self, *, leaving: bool = False) -> None:
        """One heartbeat; registers again when the coordinator does not know this process.

        Raises:
            SparserowError: it cannot be reached or refuses.
        """
        request = pb.ShardHeartbeatRequest(
            shard=self._shard,
            instance=self._instance,
            data=self._data,
            draining=self._draining,
            leaving=leaving,
        )
        lost = self.lost()
        if lost != self._told_lost:
            request.lost.extend(lost)
        try:
            reply = await self._call("ShardHeartbeat", request)
        except NotFound:
            if leaving:
                return
            log.info("%s does not know this shard; it registers again", self._peer)
            await self.register()
            reply = await self._call("ShardHeartbeat", request)
        self._lease_sec, self._told_lost = reply.lease_sec, lost

    async def keep_beating(self) -> None:
        """Heartbeats until cancelled. An unreachable coordinator is waited for: rows are worth more than a lease.

        Raises:
            FailedPrecondition, InvalidArgument: the coordinator refuses this process for good.
        """
        reached = True
        while True:
            try:
                await self.beat()
                if not reached:
                    log.info("%s is back", self._peer)
                reached = True
            except SparserowError as error:
                if error.code in ("FailedPrecondition", "InvalidArgument"):
                    raise
                if reached:
                    log.warning("%s; trying again until it is back", error)
                reached = False
            await asyncio.sleep(min(1.0, self._lease_sec / _BEATS_PER_LEASE))

    async def _call(self, method: str, request: Any) -> Any:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ELECTION_SEC
        while True:
            asked = self._addresses.now
            try:
                return await getattr(self._stubs[asked], method)(request, timeout=CALL_DEADLINE_SEC)
            except grpc.RpcError as error:
                remedy = "; start it with `sparserow coordinator` or `sparserow up`"
                if not self._addresses.turn(error, asked, may_repeat=True) or loop.time() > deadline:
                    raise error_of_status(error, f"coordinator {asked}", remedy=remedy) from None
            await asyncio.sleep(_PAUSE_SEC)
