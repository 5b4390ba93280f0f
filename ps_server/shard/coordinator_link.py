"""The shard's side of its lease: it claims the shard, reports where it serves, and sends heartbeats."""

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
from ...proto.security.channels import AioSecureChannel
from .coordinator_clock import CoordinatorClock

log = logging.getLogger(__name__)

CALL_DEADLINE_SEC = 5.0
_BEATS_PER_LEASE = 5
_PAUSE_SEC = 0.1
_ASK_SEC = 1.0  # seconds between two requests for a shard that may become free
_LONGEST_WAIT_SEC = 600.0  # for a shard to become free; then the process ends, and its supervisor restarts it


@dataclass(frozen=True)
class Registration:
    """What the coordinator gave to this process; all but the lineage is fixed for its life."""

    cluster_id: int
    slot_count: int
    lineage: int

    @property
    def identity(self) -> tuple[int, int]:
        """The pair (cluster id, slot count), which is fixed."""
        return self.cluster_id, self.slot_count


class CoordinatorLink:
    """The connection of one shard to its coordinator. It belongs to one event loop.

    Args:
        coordinator: ``HOST:PORT``; with several coordinators the addresses of all, with commas.
        shard: the index of the shard that this process claims.
        control: the (host, port) of its own Shard service.

    Attributes:
        lost: returns the commits that this process lacks; the heartbeat after a change reports them.
        clock: the time of the coordinator.
        tokens_refused: how many heartbeats the coordinator has refused for the sake of this process's token.
    """

    def __init__(self, coordinator: str, shard: int, control: tuple[str, int]) -> None:
        self.lost: Callable[[], list[pb.LostRange]] = list
        self.clock = CoordinatorClock()
        self.tokens_refused = 0
        self._reported_lost: list[pb.LostRange] = []
        self._addresses = Addresses(coordinator, what="--coordinator")
        self._shard = shard
        self._instance = secrets.randbits(63) + 1
        self._control = pb.Address(host=control[0], port=control[1])
        self._data: pb.Address | None = None
        self._place: Registration | None = None
        self._lease_sec = 10.0
        self._draining = False
        self._channels = {each: AioSecureChannel(each) for each in self._addresses.all}
        self._stubs: dict[str, Any] = {each: pb_grpc.CoordinatorStub(it) for each, it in self._channels.items()}

    async def close(self) -> None:
        """Closes the connections."""
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    @property
    def _peer(self) -> str:
        return f"coordinator {self._addresses.now}"

    async def register(self) -> Registration:
        """Claims the shard, or claims it again from a restarted coordinator.

        It waits, at most 10 minutes, while the process that has the shard is silent, or the job that is in the way
        still runs.

        Raises:
            Unavailable: the coordinator cannot be reached.
            FailedPrecondition, InvalidArgument: the coordinator refuses, or the process that has the shard has renewed
                its lease.
        """
        request = pb.RegisterShardRequest(
            shard=self._shard,
            instance=self._instance,
            control=self._control,
            cluster_id=self._place.cluster_id if self._place is not None else 0,
            pid=os.getpid(),
            can_wait=self._place is None,  # a process with rows that was replaced does not wait
        )
        self._reported_lost = []  # a restarted coordinator may not know them
        reply = await self._call("RegisterShard", request)
        if reply.HasField("wait"):
            reply = await self._wait_for_place(request, reply.wait)
        place = Registration(reply.cluster_id, reply.slot_count, reply.lineage)
        # A restore raises the lineage, and sends it to this process itself.
        if self._place is not None and self._place.identity != place.identity:
            raise FailedPrecondition(f"{self._peer} gave {place}, and {self._place} before; restart this shard")
        self._place, self._lease_sec = place, reply.lease_sec
        return place

    async def _wait_for_place(self, request: pb.RegisterShardRequest, wait: pb.ShardWait) -> pb.RegisterShardReply:
        """Asks again until the shard is given; a coordinator that cannot be reached meanwhile is asked again too."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _LONGEST_WAIT_SEC
        said: set[bool] = set()
        while True:
            is_taken = wait.holder_pid != 0
            if is_taken not in said:
                log.warning("%s; this process waits for the shard", wait.reason)
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
        """Lets the next heartbeats report where the data plane listens."""
        self._data = pb.Address(host=host, port=port)

    def drain(self) -> None:
        """Lets the next heartbeats report that this shard is stopping."""
        self._draining = True

    async def beat(self, *, leaving: bool = False) -> None:
        """Sends one heartbeat; registers again when the coordinator does not know this process.

        Args:
            leaving: whether this process ends now.

        Raises:
            SparserowError: the coordinator cannot be reached or refuses.
        """
        request = pb.ShardHeartbeatRequest(
            shard=self._shard,
            instance=self._instance,
            data=self._data,
            draining=self._draining,
            leaving=leaving,
        )
        lost = self.lost()
        if lost != self._reported_lost:
            request.lost.extend(lost)
        try:
            reply = await self._call("ShardHeartbeat", request)
        except NotFound:
            if leaving:
                return
            log.info("%s does not know this shard; it registers again", self._peer)
            await self.register()
            reply = await self._call("ShardHeartbeat", request)
        self._lease_sec, self._reported_lost = reply.lease_sec, lost
        self.clock.heard(reply.unix_sec)

    async def keep_beating(self) -> None:
        """Sends heartbeats until cancelled, also while the coordinator cannot be reached, or refuses the token of this
        process, because rows are worth more than a lease.

        (While tokens change, each process reads the files at its own second.)

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
                self.tokens_refused += error.code == "PermissionDenied"
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
