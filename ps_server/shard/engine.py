"""The native half of a shard: the store and the data-plane server, behind the calls that the coordinator makes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...cpp_ext import _server
from ...proto import control_pb2 as pb
from ...proto.config.cluster_config import ClusterConfig
from ...proto.errors import FailedPrecondition, NotFound
from ...proto.route import owners_of_runs
from ...proto.schema import TableSchema
from ...proto.security.security import Security, process_security
from ...proto.shard_protocol import SHARD_PROTOCOL
from .coordinator_link import Registration
from .follow_gate import FollowGate
from .load import hottest_share, load_message, table_messages, tier_message
from .native_schema import native_schema
from .ssd_folder import SsdFolder
from .table_sweeps import TableSweeps

_MOST_LOST_RANGES = 10_000  # the largest number of ranges in a heartbeat
REFUSAL_DEADLINE_SEC = 35.0  # time for earlier requests to end; longer than their default deadline


@dataclass(frozen=True)
class EngineOptions:
    """The options of a shard's engine.

    Args:
        shard: the index of the shard.
        host, port: the address of the data plane; port 0 lets the system choose.
        memory_budget_bytes: the budget of rows and indexes; 0 means no budget.
        io_threads: the number of network threads of the data plane.
        ssd_path: the folder whose folder ``shard-N`` has the rows beyond the budget; None keeps all rows in memory.
        ssd_bytes: the bound on files in it; 0 means what the disk has.
        ssd_engine: the storage of rows in it, ``pages`` or ``rocksdb``.
        ssd_direct_io: whether the engine ``pages`` reads and writes past the system's cache.
        sweep_every_sec: the time between sweeps of the tables whose policy removes rows; None sweeps by command alone.
        observe: whether requests are timed and their keys sampled.
    """

    shard: int
    host: str
    port: int
    memory_budget_bytes: int
    io_threads: int
    ssd_path: str | None = None
    ssd_bytes: int = 0
    ssd_engine: str = "pages"
    ssd_direct_io: bool = False
    sweep_every_sec: float | None = None
    observe: bool = True

    @staticmethod
    def of_cluster(cluster: ClusterConfig, shard: int, host: str, port: int, *, observe: bool = True) -> EngineOptions:
        """Returns the options for a shard of ``cluster``; ``port`` is the port of the shard's data plane."""
        return EngineOptions(
            shard=shard,
            host=host,
            port=port,
            memory_budget_bytes=cluster.memory_budget or 0,
            io_threads=cluster.io_threads,
            ssd_path=cluster.ssd_path,
            ssd_bytes=cluster.ssd_bytes or 0,
            ssd_engine=cluster.ssd_engine,
            ssd_direct_io=cluster.ssd_direct_io,
            sweep_every_sec=cluster.sweep_every,
            observe=observe,
        )


class ShardEngine:
    """The store and the data plane of one shard.

    It is thread-safe where the native objects are; the set of jobs belongs to the event loop.

    Args:
        options: the options of the engine.
        place: what the coordinator gave to this process.

    Attributes:
        sweeps: the sweeps of the tables.
        follow_gate: keeps followers from the rows while they are loaded.
        following: returns what followers say of themselves.

    Raises:
        Unavailable: the port is taken.
        InvalidArgument: ``ssd_path`` is missing, cannot be written, or has the rows of another shard.
        FailedPrecondition: another process uses ``ssd_path``, or this build has no RocksDB and ``ssd_engine`` names it,
            or the file system of ``ssd_path`` has no direct I/O and ``ssd_direct_io`` wants it.
    """

    def __init__(self, options: EngineOptions, place: Registration) -> None:
        self.cluster_id = place.cluster_id
        self.following: Callable[[], list[pb.FollowerLoad]] = list
        self._slot_count = place.slot_count
        self._memory_budget_bytes = options.memory_budget_bytes
        self._ssd_folder = None if options.ssd_path is None else SsdFolder(options.ssd_path, options.shard)
        self._store = _server.Store(
            memory_budget_bytes=options.memory_budget_bytes,
            slot_count=place.slot_count,
            lineage=place.lineage,
            ssd_path="" if self._ssd_folder is None else str(self._ssd_folder.path),
            ssd_bytes=options.ssd_bytes,
            ssd_engine=options.ssd_engine,
            ssd_direct_io=options.ssd_direct_io,
            cluster_id=place.cluster_id,
            shard=options.shard,
        )
        self._server = _server.Server(
            self._store,
            host=options.host,
            port=options.port,
            io_threads=options.io_threads,
            cluster_id=place.cluster_id,
            shard_index=options.shard,
            observe=options.observe,
            local=True,
            **process_security().native_server(),
        )
        self._store.set_memory_shares(process_security().quotas.memory_shares())
        self.host = options.host
        self.shard = options.shard
        self._owned = np.zeros(place.slot_count, np.bool_)
        self._jobs: set[int] = set()
        self._began = time.monotonic()
        self.sweeps = TableSweeps(self._store, self._server, options.sweep_every_sec)
        self.follow_gate = FollowGate(options.shard)

    @property
    def store(self) -> _server.Store:
        """The store of the rows; thread-safe."""
        return self._store

    @property
    def server(self) -> _server.Server:
        """The data-plane server; thread-safe."""
        return self._server

    @property
    def port(self) -> int:
        """The port on which the data plane listens."""
        return int(self._server.port)

    def set_security(self, security: Security) -> None:
        """Sets the certificates of new connections, the tokens from the next request on, and the shares of memory.

        Raises:
            InvalidArgument: a text is not a certificate or key. Nothing is changed then.
        """
        security.give_to(self._server)
        self._store.set_memory_shares(security.quotas.memory_shares())

    def create_tables(self, schemas: Iterable[TableSchema]) -> None:
        """Creates tables; the call is harmless for tables that exist.

        Raises:
            FailedPrecondition: a table exists with another schema.
        """
        for schema in schemas:
            self._store.create_table(native_schema(schema))
            self.sweeps.add(schema)
        self._write_table_names()

    def drop_table(self, table_id: int) -> None:
        """Removes a table and its rows.

        Raises:
            NotFound: there is no such table.
        """
        self._store.drop_table(table_id)
        self.sweeps.remove(table_id)
        self._server.count_write(table_id)
        self._write_table_names()

    def _write_table_names(self) -> None:
        if self._ssd_folder is not None:
            self._ssd_folder.write_table_names(self._store.stats())

    def set_route(self, route: pb.Route) -> None:
        """Takes over a slot map.

        Raises:
            FailedPrecondition: its slot count differs from the slot count of this shard.
        """
        if route.slot_count != self._slot_count:
            raise FailedPrecondition(
                f"route: {route.slot_count} slots are not allowed; allowed: {self._slot_count}, as on this shard"
            )
        self._server.set_route(route.epoch, self.note_owned(route))

    def refuse(self, refusal: pb.Refusal) -> None:
        """Refuses requests for rows of these tables, and all followers, from now on; a refusal without tables ends
        that.

        The call returns when earlier requests and pages have ended.

        Raises:
            DeadlineExceeded: an earlier request takes too long; the tables are refused all the same.
        """
        if refusal.table_ids:
            self.follow_gate.close(refusal, REFUSAL_DEADLINE_SEC)
        self._server.refuse_tables(
            refusal.code, refusal.message, list(refusal.table_ids), deadline_ms=round(REFUSAL_DEADLINE_SEC * 1000)
        )
        if not refusal.table_ids:
            self.follow_gate.open()

    def note_owned(self, route: pb.Route) -> NDArray[np.uint16]:
        """Notes the slots of this shard before it serves them, and returns the owner of each
        slot, (slot_count) uint16.
        """
        owners = owners_of_runs([(run.start, run.shard) for run in route.runs], route.slot_count)
        self._owned = owners == self.shard
        self.sweeps.slot_share = float(self._owned.mean())
        return owners

    def set_job(self, request: pb.SetJobRequest) -> None:
        """Takes over the members of a job; a new generation starts a new clock.

        Raises:
            FailedPrecondition: the operation is older than the last one, or an epoch would go down.
        """
        self._server.set_job(
            request.job_id,
            request.name,
            request.staleness if request.HasField("staleness") else None,
            members=[
                (
                    member.worker_id,
                    member.epoch,
                    member.rank,
                    member.first_step,
                    member.until_step if member.HasField("until_step") else None,
                    member.final_sequence,
                    member.proof_sha256,
                )
                for member in request.members
            ],
            generation=request.generation,
            operation=request.operation,
            quorum=request.quorum,
        )
        self._jobs.add(request.job_id)

    def freeze_job(self, request: pb.FreezeJobRequest) -> pb.FreezeJobReply:
        """Refuses new commits of a job until it is set or the lease ends, and returns what each worker has committed.

        Raises:
            FailedPrecondition: the operation is not newer than the last one.
        """
        fence = [(worker.worker_id, worker.epoch) for worker in request.fence]
        windows = [
            pb.WorkerWindow(
                worker_id=worker_id,
                epoch=epoch,
                committed_sequence=sequence,
                committed_step=step,
                steps_taken=steps,
                writes_taken=writes,
            )
            for worker_id, epoch, sequence, step, _, steps, writes in self._server.freeze_job(
                request.job_id, request.operation, fence, request.lease_ms
            )
        ]
        return pb.FreezeJobReply(windows=windows)

    def drop_job(self, job_id: int, operation: int) -> None:
        """Forgets a job.

        Raises:
            NotFound: there is no such job.
            FailedPrecondition: the operation is older than the last one.
        """
        self._server.drop_job(job_id, operation)
        self._jobs.discard(job_id)

    def stats(self) -> dict[str, Any]:
        """Returns the counters of the data plane by name (``ServerStats`` of rpc/server/server.h)."""
        return dict(self._server.stats())

    def lost_commits(self) -> list[pb.LostRange]:
        """Returns the commits that this process lacks and that were not sent again, at most ``_MOST_LOST_RANGES``
        ranges.
        """
        ranges = self._server.lost_commits()[:_MOST_LOST_RANGES]
        return [
            pb.LostRange(job_id=job, worker_id=worker, epoch=epoch, is_steps=is_steps, first=first, last=last)
            for job, worker, epoch, is_steps, first, last in ranges
        ]

    def stats_message(self) -> pb.ShardStatsReply:
        """Returns the statistics that ``sparserow status`` shows."""
        stats = self.stats()
        return pb.ShardStatsReply(
            tables=table_messages(self.table_stats(), stats),
            job_ids=sorted(self._jobs),
            used_bytes=self.used_bytes,
            reserved_bytes=self.reserved_bytes,
            memory_budget_bytes=self._memory_budget_bytes,
            requests=stats["frames_received"],
            connections=stats["connections_open"],
            local_connections=stats["connections_local"],
            job_steps={job: step for job, step in stats["job_steps"].items() if step >= 0},
            tier=tier_message(self.tier_stats()),
            commits_lost=stats["commits_lost"],
            lost=self.lost_commits(),
            protocol=SHARD_PROTOCOL,
            load=load_message(self._server, self._store, stats, time.monotonic() - self._began, self.following()),
        )

    def tables_message(self, table_ids: Sequence[int]) -> pb.ShardStatsReply:
        """Returns the rows and bytes of these tables, as far as they exist."""
        return pb.ShardStatsReply(tables=table_messages(self._store.stats(table_ids), {"staleness": {}}))

    def hottest_share(self) -> float:
        """Returns the share of the sampled keys that the hottest key has at least, in [0, 1]."""
        return hottest_share(self._server)

    def table_stats(self) -> list[_server.TableStats]:
        """Returns the rows and bytes of each table."""
        return self._store.stats()

    def tier_stats(self) -> dict[str, int | float] | None:
        """Returns the counters of the SSD by name (see ``cpp_ext/_server.pyi``); None without an SSD."""
        return self._store.tier_stats()

    @property
    def used_bytes(self) -> int:
        """The allocated bytes of rows and indexes."""
        return self._store.used_bytes

    @property
    def reserved_bytes(self) -> int:
        """The bytes that have pages before a row needs them, beside ``used_bytes``."""
        return self._store.reserved_bytes

    @property
    def memory_budget_bytes(self) -> int:
        """The memory budget in bytes; 0 when there is none."""
        return self._memory_budget_bytes

    @property
    def slot_count(self) -> int:
        """The number of slots of the cluster."""
        return self._slot_count

    @property
    def owned_slots(self) -> NDArray[np.bool_]:
        """Whether this shard owns each slot, (slot_count) bool, by the present slot map."""
        return self._owned

    def cut(
        self, request: pb.CutRequest, since: NDArray[np.uint64] | None
    ) -> tuple[_server.Snapshot, list[dict[str, Any]]]:
        """Returns the rows and commit windows of one instant, once all commits of the cut are applied.

        Args:
            request: the jobs, and the points where they are cut.
            since: (slot_count) uint64, the versions after which rows are saved; None saves all rows.

        Raises:
            DeadlineExceeded, Unavailable: as for ``Server.cut``.
            FailedPrecondition: a save of the rows is under way already.
        """
        jobs = [
            (job.job_id, job.operation, job.step, [(w.worker_id, w.epoch, w.sequence) for w in job.workers])
            for job in request.jobs
        ]
        return self._server.cut(
            self._store,
            jobs,
            deadline_ms=request.deadline_ms,
            side_budget_bytes=request.side_budget_bytes,
            since=since,
        )

    def install_jobs(self, windows: list[dict[str, Any]]) -> None:
        """Installs commit windows of jobs, as :meth:`cut` returns them, for the next generation that they name."""
        self._server.install_jobs(windows)

    def remake_tables(self, schemas: Sequence[TableSchema]) -> None:
        """Creates tables without rows in place of existing ones; row caches of workers learn that all rows have
        changed.
        """
        for schema in schemas:
            with contextlib.suppress(NotFound):
                self._store.drop_table(schema.id)
            self.sweeps.remove(schema.id)
        self.create_tables(schemas)
        for schema in schemas:
            self._server.count_write(schema.id)

    def drain(self, deadline_ms: int) -> None:
        """Refuses new requests, and blocks until the requests under way are done, at most ``deadline_ms``."""
        self._store.stop_sweeps()
        self._server.drain(deadline_ms)

    def stop(self) -> None:
        """Stops the sweeps and closes all connections."""
        self._store.stop_sweeps()
        self.sweeps.stop()
        self._server.stop()
