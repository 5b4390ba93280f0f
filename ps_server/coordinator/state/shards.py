"""Which process serves which shard, and until when it is believed to live. No I/O; not thread-safe.

    MISSING -register-> STARTING -data address, then told everything-> SERVING -drains-> DRAINING
        any of them -lease ends, or leaves-> LOST -another process registers-> STARTING

Times are seconds of a monotonic clock that the caller passes in.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import Enum

from ....proto.errors import FailedPrecondition, NotFound, not_allowed

_ASKED_SEC = 5.0  # a process that waits for a place asks for it more often


class PlaceNotFree(FailedPrecondition):
    """A place that may come free by itself: its holder's lease ends, or the job that is in the way does."""


class ShardPhase(Enum):
    """States of a shard; the values are those of ``ShardState`` in control.proto."""

    MISSING = 0
    STARTING = 1
    SERVING = 2
    DRAINING = 3
    LOST = 4


@dataclass
class Shard:
    """One shard's place.

    Attributes:
        instance: random number of the process that holds it; 0 before the first.
        lineage: of the versions that this process writes.
        control, data: addresses (host, port) of its Shard service and its data plane.
        behind: it must be told route, tables and jobs before it serves (again).
        restoring: it replaces a process that ended with rows, and gets these from a checkpoint before it serves.
        restores: how often it came back so.
        protocol: version of the messages that its process speaks (proto/shard_protocol.py); 0: it has not said yet.
        renewals: of the lease by the process that holds it.
        asked_at: when another process asked last for a place that may come free; None: none has.
        refusal: what it was told, where the process before it ended with rows; empty: it has not asked, or was let in.
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
        """Whether a process holds it and its lease runs."""
        return self.phase in (ShardPhase.STARTING, ShardPhase.SERVING, ShardPhase.DRAINING)

    def is_coming_back(self, now: float) -> bool:
        """Whether a process gets the rows of one that ended, or waits until it may."""
        return self.restoring if self.is_live else self.is_asked_for(now)

    def is_asked_for(self, now: float) -> bool:
        """Whether a process that is not let in has asked of late."""
        return self.asked_at is not None and now < self.asked_at + _ASKED_SEC


class ShardBook:
    """Leases of all shards.

    Args:
        count: of shards that the cluster is made of.
        lease_sec: a shard that has not been heard of for so long is lost.
    """

    def __init__(self, count: int, lease_sec: float) -> None:
        self.shards = [Shard(index) for index in range(count)]
        self.lease_sec = lease_sec
        self.lineage = 1  # the newest given out

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
        """Gives a shard to a process; the same process may come again.

        A process that replaces another starts without rows. While tables exist it is restored before it serves, or
        refused: reading initial rows in place of trained ones would go unnoticed.

        Args:
            problem: why a shard cannot be restored alone; empty: it can be.
            passes: whether that reason goes away without a change of the cluster.

        Raises:
            InvalidArgument: no such shard.
            PlaceNotFree: another process holds it, or the reason passes.
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
                    raise PlaceNotFree(f"{ended}; another process is let in when the job has ended")
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
        """Renews a lease. A process whose lease had ended must be told everything before it serves again.

        Raises:
            NotFound: this process does not hold the shard; it must register.
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
        """What of a shard's place must outlive the coordinator; empty of an index that is none."""
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
        """Takes over a former coordinator's knowledge of a shard: its process keeps it, for a lease from now on."""
        shard = self.shards[index]
        shard.instance, shard.lineage, shard.pid = instance, lineage, pid
        shard.control, shard.data = control, data
        shard.restoring, shard.restores = restoring, restores
        if instance:
            shard.phase = ShardPhase.STARTING if held else ShardPhase.LOST
        shard.expires_at = now + self.lease_sec

    def mark_serving(self, index: int, instance: int) -> None:
        """The process has been told everything; ignored when another one holds the shard now, or it drains."""
        shard = self.shards[index]
        if shard.instance == instance and shard.phase in (ShardPhase.STARTING, ShardPhase.SERVING):
            shard.phase, shard.behind = ShardPhase.SERVING, False

    def mark_behind(self, index: int, instance: int) -> None:
        """A change could not be told to the process; it serves again once it has been told everything."""
        shard = self.shards[index]
        if shard.instance == instance and shard.phase is ShardPhase.SERVING:
            shard.phase, shard.behind = ShardPhase.STARTING, True

    def leave(self, index: int, instance: int) -> None:
        """The process ends in good order."""
        shard = self.shards[index]
        if shard.instance == instance:
            shard.phase = ShardPhase.LOST

    def expire(self, now: float) -> list[Shard]:
        """Marks shards whose lease has ended as lost, and returns these."""
        lost = [shard for shard in self.shards if shard.is_live and shard.expires_at <= now]
        for shard in lost:
            shard.phase = ShardPhase.LOST
        return lost

    def extend(self, seconds: float) -> None:
        """Lengthens every lease by a time in which no heartbeat could arrive."""
        for shard in self.shards:
            shard.expires_at += seconds

    def replaced(self, now: float) -> str:
        """Why a process that waits for the place of a shard that ended with rows is not let in; empty: none waits so.

        A job whose workers and shards go back together ends then.
        """
        ended = (shard for shard in self.shards if not shard.is_live and shard.is_asked_for(now))
        return next((shard.refusal for shard in ended if shard.refusal), "")

    def processes(self) -> int:
        """A hash of the processes that have the places, and where their data planes listen; 0 while one is away."""
        if self.problem():
            return 0
        places = repr([(shard.instance, shard.data) for shard in self.shards])
        return int.from_bytes(hashlib.blake2b(places.encode(), digest_size=8).digest(), "little") or 1

    def problem(self) -> str:
        """Why the cluster is not ready, for a user; empty when every shard serves."""
        waiting = [shard.index for shard in self.shards if shard.phase is ShardPhase.MISSING]
        if waiting:
            came = len(self.shards) - len(waiting)
            return f"{came} of {len(self.shards)} shards have registered; waiting for {_shards(waiting)}"
        for phase, words in (
            (ShardPhase.LOST, "no sign of life from its process"),
            (ShardPhase.DRAINING, "its process is stopping"),
            (ShardPhase.STARTING, "its process is not serving yet"),
        ):
            found = [shard.index for shard in self.shards if shard.phase is phase]
            if found:
                return f"{_shards(found)}: {words}"
        return ""


def _shards(indexes: list[int]) -> str:
    return ("shard " if len(indexes) == 1 else "shards ") + ", ".join(map(str, indexes))
