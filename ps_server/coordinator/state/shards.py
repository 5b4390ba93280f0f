"""Which process serves which shard, and until when it counts as alive. The module does no I/O and is not thread-safe.

    MISSING -register-> STARTING -data address, then the whole state sent-> SERVING -drains-> DRAINING
        any of them -lease ends, or leaves-> LOST -another process registers-> STARTING

Times are seconds of a monotonic clock that the caller passes in.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import Enum

from ....proto.errors import FailedPrecondition, NotFound, not_allowed

_ASKED_SEC = 5.0  # a process that waits for a shard asks more often than this


class PlaceNotFree(FailedPrecondition):
    """A shard that may become free by itself, when its holder's lease or the job in the way ends."""


class ShardPhase(Enum):
    """The states of a shard; the values are those of ``ShardState`` in control.proto."""

    MISSING = 0
    STARTING = 1
    SERVING = 2
    DRAINING = 3
    LOST = 4


@dataclass
class Shard:
    """One shard and the process that has it.

    Attributes:
        instance: the random number of the process that has the shard; 0 before the first.
        lineage: the lineage of the versions that this process writes.
        control, data: the addresses (host, port) of its Shard service and its data plane.
        expires_at: the end of its lease, in seconds of a monotonic clock.
        behind: whether it must receive route, tables and jobs before it serves, or serves again.
        restoring: whether it replaces a process that ended with rows, and loads these from a checkpoint before it
            serves.
        restores: the number of such restores.
        protocol: the version of the messages that its process speaks (proto/shard_protocol.py); 0 when it is not known
            yet.
        renewals: the number of lease renewals by its process.
        asked_at: the time at which another process last asked for a shard that may become free; None when none has.
        refusal: the answer to such a process, when the process before it ended with rows; empty when none asked or one
            was accepted.
    """

    index: int
    phase: ShardPhase = ShardPhase.MISSING
    instance: int = 0
    lineage: int = 0
    control: tuple[str, int] | None = None
    data: tuple[str, int] | None = None
    pid: int = 0
    expires_at: float = 0.0
    behind: bool = True
    restoring: bool = False
    restores: int = 0
    protocol: int = 0
    renewals: int = 0
    asked_at: float | None = None
    refusal: str = ""
    draining: bool = field(default=False, repr=False)

    @property
    def is_live(self) -> bool:
        """Whether a process has the shard and its lease runs."""
        return self.phase in (ShardPhase.STARTING, ShardPhase.SERVING, ShardPhase.DRAINING)

    def is_coming_back(self, now: float) -> bool:
        """Whether a process loads the rows of one that ended, or waits until it may."""
        return self.restoring if self.is_live else self.is_asked_for(now)

    def is_asked_for(self, now: float) -> bool:
        """Whether a process that was not accepted has asked recently."""
        return self.asked_at is not None and now < self.asked_at + _ASKED_SEC


class ShardBook:
    """The leases of all shards.

    Args:
        count: the number of shards of the cluster.
        lease_sec: the seconds without a heartbeat after which a shard is lost.
    """

    def __init__(self, count: int, lease_sec: float) -> None:
        self.shards = [Shard(index) for index in range(count)]
        self.lease_sec = lease_sec
        self.lineage = 1  # the newest lineage that was given out

    def register(
        self,
        index: int,
        *,
        instance: int,
        control: tuple[str, int],
        pid: int,
        tables: int,
        now: float,
        problem: str = "",
        passes: bool = False,
    ) -> Shard:
        """Gives a shard to a process; the same process may register again.

        A process that replaces another starts without rows. While tables exist it is restored before it serves, or
        refused: otherwise initial rows would silently replace trained ones.

        Args:
            index: the index of the shard.
            instance: the random number of the process.
            control: the address (host, port) of its Shard service.
            pid: its process id.
            tables: the number of tables of the cluster whose rows it needs.
            now: the present time, in seconds.
            problem: why a shard cannot be restored alone; empty when it can be.
            passes: whether that reason ends without a change of the cluster.

        Raises:
            InvalidArgument: there is no such shard.
            PlaceNotFree: another process has the shard, or the reason will end.
            FailedPrecondition: the rows of the former process are lost.
        """
        if not 0 <= index < len(self.shards):
            raise not_allowed("shard", index, f"[0, {len(self.shards) - 1}], the cluster has {len(self.shards)} shards")
        shard = self.shards[index]
        if shard.instance != instance:
            if shard.is_live:
                shard.asked_at = now
                raise PlaceNotFree(
                    f"shard {index} is held by process {shard.pid}; stop it first, or wait "
                    f"{max(0.0, shard.expires_at - now):.1f} s for its lease to end"
                )
            if shard.instance != 0 and tables and problem:
                ended = f"shard {index} ended with its rows of {tables} tables, and {problem}"
                shard.asked_at, shard.refusal = now, ended
                if passes:
                    raise PlaceNotFree(f"{ended}; another process is accepted when the job has ended")
                raise FailedPrecondition(f"{ended}; start a new cluster and restore a checkpoint")
            if shard.instance != 0:
                self.lineage += 1
            shard.renewals, shard.asked_at, shard.refusal = 0, None, ""
            shard.lineage, shard.restoring = self.lineage, shard.instance != 0 and tables > 0
        shard.instance, shard.control, shard.pid, shard.protocol = instance, control, pid, 0
        shard.phase, shard.data, shard.behind, shard.draining = ShardPhase.STARTING, None, True, False
        shard.expires_at = now + self.lease_sec
        return shard

    def heartbeat(
        self,
        index: int,
        *,
        instance: int,
        data: tuple[str, int] | None,
        draining: bool,
        now: float,
    ) -> Shard:
        """Renews a lease. A process whose lease had ended must receive the whole state before it serves again.

        Raises:
            NotFound: this process does not have the shard; it must register.
        """
        shard = self.shards[index] if 0 <= index < len(self.shards) else None
        if shard is None or shard.instance != instance or shard.phase is ShardPhase.MISSING:
            raise NotFound(f"shard {index} is not registered by this process")
        if shard.phase is ShardPhase.LOST:
            shard.phase, shard.behind = ShardPhase.STARTING, True
        if data is not None and data != shard.data:
            shard.data, shard.behind = data, True
        if draining:
            shard.phase, shard.draining = ShardPhase.DRAINING, True
        shard.expires_at = now + self.lease_sec
        shard.renewals += 1
        return shard

    def place(self, index: int) -> tuple[object, ...]:
        """Returns what of a shard must outlive the coordinator; empty when there is no such shard."""
        if not 0 <= index < len(self.shards):
            return ()
        shard = self.shards[index]
        return shard.instance, shard.data, shard.is_live

    def remember(
        self,
        index: int,
        *,
        held: bool,
        instance: int,
        lineage: int,
        control: tuple[str, int] | None,
        data: tuple[str, int] | None,
        pid: int,
        restoring: bool,
        restores: int,
        now: float,
    ) -> None:
        """Restores a shard from a former coordinator's state; its process keeps it for a lease from now on."""
        shard = self.shards[index]
        shard.instance, shard.lineage, shard.pid = instance, lineage, pid
        shard.control, shard.data = control, data
        shard.restoring, shard.restores = restoring, restores
        if instance:
            shard.phase = ShardPhase.STARTING if held else ShardPhase.LOST
        shard.expires_at = now + self.lease_sec

    def mark_serving(self, index: int, instance: int) -> None:
        """Notes that the process has the whole state; ignored when another process has the shard now, or it drains."""
        shard = self.shards[index]
        if shard.instance == instance and shard.phase in (ShardPhase.STARTING, ShardPhase.SERVING):
            shard.phase, shard.behind = ShardPhase.SERVING, False

    def mark_behind(self, index: int, instance: int) -> None:
        """Notes that the process missed a change; it serves again once it has received the whole state."""
        shard = self.shards[index]
        if shard.instance == instance and shard.phase is ShardPhase.SERVING:
            shard.phase, shard.behind = ShardPhase.STARTING, True

    def leave(self, index: int, instance: int) -> None:
        """Notes that the process has ended in order."""
        shard = self.shards[index]
        if shard.instance == instance:
            shard.phase = ShardPhase.LOST

    def expire(self, now: float) -> list[Shard]:
        """Marks the shards whose lease has ended as lost, and returns them."""
        lost = [shard for shard in self.shards if shard.is_live and shard.expires_at <= now]
        for shard in lost:
            shard.phase = ShardPhase.LOST
        return lost

    def extend(self, seconds: float) -> None:
        """Extends every lease by a time in which no heartbeat could arrive."""
        for shard in self.shards:
            shard.expires_at += seconds

    def replaced(self, now: float) -> str:
        """Returns why a process that waits for an ended shard with rows is not accepted; empty when no process waits
        so.

        A job whose workers and shards have to be restored together ends then.
        """
        ended = (shard for shard in self.shards if not shard.is_live and shard.is_asked_for(now))
        return next((shard.refusal for shard in ended if shard.refusal), "")

    def processes(self) -> int:
        """Returns a hash of the processes of all shards and the addresses of their data planes; 0 while one is away."""
        if self.problem():
            return 0
        places = repr([(shard.instance, shard.data) for shard in self.shards])
        return int.from_bytes(hashlib.blake2b(places.encode(), digest_size=8).digest(), "little") or 1

    def problem(self) -> str:
        """Returns why the cluster is not ready, in words for users; empty when every shard serves."""
        waiting = [shard.index for shard in self.shards if shard.phase is ShardPhase.MISSING]
        if waiting:
            came = len(self.shards) - len(waiting)
            return f"{came} of {len(self.shards)} shards have registered; waiting for {_shards(waiting)}"
        for phase, words in (
            (ShardPhase.LOST, "its process sends no heartbeat"),
            (ShardPhase.DRAINING, "its process is stopping"),
            (ShardPhase.STARTING, "its process is not serving yet"),
        ):
            found = [shard.index for shard in self.shards if shard.phase is phase]
            if found:
                return f"{_shards(found)}: {words}"
        return ""


def _shards(indexes: list[int]) -> str:
    return ("shard " if len(indexes) == 1 else "shards ") + ", ".join(map(str, indexes))
