"""The whole state of a coordinator, and its saved form. The module does no I/O and is not thread-safe.

The saved form is one JSON document. It names the holder of each lease, but not the lease's end. After a restart all
leases begin again, so that the time without a coordinator ends no lease.
"""

from __future__ import annotations

import base64
import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ....proto import control_pb2 as pb
from ....proto.checkpoint.manifest import Manifest
from ....proto.config.cluster_config import ClusterConfig
from ....proto.documents import check_format
from ....proto.errors import DataLoss, FailedPrecondition, SparserowError, Unavailable
from ....proto.schema_message import schema_of_message
from .checkpoint_roots import CheckpointRoots
from .damage import Damage
from .data_leases import DataLeases, JobData
from .departed_workers import UNKNOWN, DepartedWorker, DepartedWorkers
from .faults import FaultBook
from .lost_commits import CommitOwner, LostCommits
from .membership import Identity, Job, JobTerms, Member, Membership, Ticket
from .registry import Registry
from .roster import CommitWindow, Roster, Span
from .row_sources import RowSource, of_document, to_document
from .shards import Shard, ShardBook
from .slots import SlotMap
from .stream_leases import JobStream, is_of_stream

log = logging.getLogger(__name__)

FORMAT, OLDEST_FORMAT = 6, 6  # what is written, and the oldest that is read


@dataclass(frozen=True)
class ClusterOptions:
    """The options of a cluster, which its creation fixes, except for the leases.

    Args:
        shards: the number of parameter servers.
        slot_count: the number of slots, a power of two in [2, 65536].
        worker_lease_sec, shard_lease_sec: see :class:`Membership` and :class:`ShardBook`.
        checkpoint_roots: the folders below which the cluster saves and restores.
        job_memory_sec: see :class:`Membership`.
    """

    shards: int
    slot_count: int
    worker_lease_sec: float = 10.0
    shard_lease_sec: float = 10.0
    checkpoint_roots: CheckpointRoots = field(default_factory=CheckpointRoots)
    job_memory_sec: float = 3600.0

    @staticmethod
    def of_config(config: ClusterConfig, *, is_loopback: bool, job_memory_sec: float = 3600.0) -> ClusterOptions:
        """Returns the options of a validated configuration; ``is_loopback`` says whether only this machine reaches the
        cluster.
        """
        return ClusterOptions(
            config.shards,
            config.slot_count,
            config.worker_lease,
            config.shard_lease,
            CheckpointRoots(config.checkpoint_roots, is_loopback=is_loopback),
            job_memory_sec,
        )


@dataclass
class Cluster:
    """The state of a cluster, as its coordinator knows it."""

    cluster_id: int
    slots: SlotMap
    shards: ShardBook
    registry: Registry = field(default_factory=Registry)
    jobs: Membership = field(default_factory=lambda: Membership(10.0))
    rosters: dict[int, Roster] = field(default_factory=dict)  # by job id: the members that the shards know
    operations: int = 0  # number of the newest operation on a job
    rows_checkpoint: tuple[str, str] | None = None  # (url, name) of the newest checkpoint that has this cluster's rows
    row_sources: dict[int, RowSource] = field(default_factory=dict)  # by id: tables that were restored since then
    data: DataLeases = field(default_factory=DataLeases)
    row_saves: dict[str, dict[int, float]] = field(default_factory=dict)  # by URL: seconds between saves, by job
    row_configs: dict[str, str] = field(default_factory=dict)  # by URL: the configuration in these saves, as JSON
    saved_at: float | None = None  # Unix seconds: the time of the checkpoint in rows_checkpoint
    checkpoint_links: int = 0  # the checkpoints that the rows of the one in rows_checkpoint lie in; 0: not known
    save_took_sec: float | None = None  # of the checkpoint in rows_checkpoint; None: this coordinator did not save it
    saves_failed: int = 0
    faults: FaultBook = field(default_factory=FaultBook)
    lost: LostCommits = field(default_factory=LostCommits)
    departed: DepartedWorkers = field(default_factory=DepartedWorkers)
    # What workers that are leaving said, by (job id, worker id, epoch): how many commits each shard has acknowledged.
    leaving: dict[tuple[int, int, int], tuple[int, ...]] = field(default_factory=dict)
    # How often each shard had come back when a worker joined, by (job id, worker id, epoch). It is not saved.
    restores_before: dict[tuple[int, int, int], tuple[int, ...]] = field(default_factory=dict)
    damage: Damage | None = None  # tables without all of their rows
    checkpoint_roots: CheckpointRoots = field(default_factory=CheckpointRoots)
    loads: int = 0  # number of restores that began to empty tables since this process started

    @staticmethod
    def create(options: ClusterOptions) -> Cluster:
        """Returns a new cluster with a random id.

        Raises:
            InvalidArgument: ``slot_count`` or ``shards`` is out of range.
        """
        return Cluster(
            cluster_id=secrets.randbits(63) + 1,
            slots=SlotMap.even(options.slot_count, options.shards),
            shards=ShardBook(options.shards, options.shard_lease_sec),
            jobs=Membership(options.worker_lease_sec, options.job_memory_sec),
            checkpoint_roots=options.checkpoint_roots,
        )

    def end_leases(self, now: float, unix_sec: float, waited: Collection[int] = ()) -> list[Ticket]:
        """Removes the workers whose lease has ended, and notes their faults; returns their tickets.

        Args:
            now: the present time on the clock of leases, in seconds.
            unix_sec: the present time of the calendar, in seconds.
            waited: jobs of which something waits for every worker.
        """
        ended = self.jobs.expire(now, waited)
        for ticket in ended:
            log.warning("worker %d (rank %d) has left its job: its lease has ended", ticket.worker_id, ticket.rank)
            name, key = self.jobs.names[ticket.job_id], (ticket.job_id, ticket.worker_id)
            self.faults.lease_ended(name, key, ticket.rank, ticket.epoch, unix_sec, self.jobs.lease_sec)
        return ended

    def check_ready(self) -> None:
        """Raises Unavailable with the names of the shards that are waited for, unless every shard serves."""
        problem = self.shards.problem()
        if problem:
            raise Unavailable(problem)

    def check_whole(self) -> None:
        """Raises unless every table has all of its rows.

        Raises:
            Unavailable: a restore is under way.
            FailedPrecondition: the last restore failed.
        """
        if self.damage is not None:
            raise self.damage.error()

    def refusal(self) -> pb.Refusal:
        """Returns the tables whose rows shards refuse; none while every table is whole."""
        return pb.Refusal() if self.damage is None else self.damage.refusal()

    @property
    def is_lost(self) -> bool:
        """Whether every table lacks rows, so that a shard has none to lose."""
        return self.damage is not None and self.damage.table_ids.issuperset(each.id for each in self.registry.tables())

    @property
    def awaits_restore(self) -> bool:
        """Whether only a restore can give a shard that ends its rows, so that a process without rows may replace it:
        tables lack rows, and no checkpoint has those of the others.
        """
        return self.damage is not None and (self.is_lost or bool(self.unsaved_tables()))

    def unsaved_tables(self) -> list[str]:
        """Returns the full names of tables whose rows no checkpoint has; none while one checkpoint has all rows."""
        if self.rows_checkpoint is not None:
            return []
        known = self.row_sources.keys() | (self.damage.table_ids if self.damage is not None else set())
        return [schema.full_name for schema in self.registry.tables() if schema.id not in known]

    def restored_from(self, url: str, name: str, tables: Iterable[pb.LoadTable]) -> None:
        """Notes that the checkpoint ``name`` in the folder at ``url`` has the present rows of some tables."""
        for table in tables:
            source = RowSource(url, name, table.saved_table_id, tuple(table.changed))
            self.row_sources[table.schema.id] = source

    def has_rows_in(self, url: str, manifest: Manifest, mark: int | None = None) -> None:
        """Notes that the checkpoint in the folder at ``url`` has all present rows.

        Args:
            url: the URL of the folder.
            manifest: the manifest of the checkpoint.
            mark: the number of the newest operation when it was cut; None: the rows were restored from it.
        """
        if mark is None:
            self.departed.restored(None)
            self.lost.restored(None)
        else:
            self.departed.saved(mark)
        self.rows_checkpoint = (url, manifest.name)
        self.row_sources = {}
        self.saved_at = datetime.fromisoformat(manifest.created).timestamp()
        self.save_took_sec = None
        self.checkpoint_links = 1 + len(manifest.needs)

    def namespace_of(self, job_id: int) -> str:
        """Returns the namespace of a job; "" for one that is not known any more."""
        return self.jobs.names.get(job_id, "").partition("/")[0]

    def workers_leaving(self) -> int:
        """Returns the number of workers that have left, and of whom the shards have not all heard yet."""
        members = {job_id: [member.ticket for member in job.members.values()] for job_id, job in self.jobs.jobs.items()}
        return sum(len(roster.gone(members.get(job_id, ()))) for job_id, roster in self.rosters.items())

    def note_joined(self, job_id: int, worker: tuple[int, int]) -> None:
        """Notes how often each shard had come back when a worker, (id, epoch), joined."""
        key = (job_id, *worker)
        self.restores_before[key] = tuple(shard.restores for shard in self.shards.shards)

    def note_left(self, job_id: int, worker: tuple[int, int], windows: Sequence[CommitWindow]) -> None:
        """Keeps how many commits of a worker that has left each shard had, and counts what one has lost already.

        A worker that left in order has said it. Of one that ended without a word a shard that came back meanwhile
        cannot say; the others do where it made steps alone, of which every shard gets a commit.

        Args:
            job_id: the id of the job.
            worker: the worker, (id, epoch).
            windows: what each shard has of it.
        """
        key = (job_id, *worker)
        said = self.leaving.pop(key, ())
        before = self.restores_before.pop(key, (0,) * len(windows))
        steady = [
            window
            for window, shard, then in zip(windows, self.shards.shards, before, strict=True)
            if shard.restores == then
        ]
        is_by_step = bool(steady) and not any(window.writes_taken for window in windows)
        steps = max((window.steps_taken for window in steady), default=0)
        counts = []
        for shard, window in enumerate(windows):
            if len(said) == len(windows):
                count = max(said[shard], window.taken)
            elif self.shards.shards[shard].restores == before[shard]:
                count = window.taken
            else:
                count = max(steps, window.taken) if is_by_step else UNKNOWN
            counts.append(count)
            self._count_departed(shard, key, count, window.taken)
        if any(counts):
            generation = self.rosters[job_id].generation
            namespace = self.namespace_of(job_id)
            self.departed.add(DepartedWorker(namespace, *key, generation, self.operations, tuple(counts)))

    def note_returned(self, shard: int, taken: Callable[[DepartedWorker], int]) -> None:
        """Counts what a shard that came back from a checkpoint lacks of workers that have left since.

        Args:
            shard: the index of the shard.
            taken: returns how many commits and writes of a worker the checkpoint has for this shard.
        """
        for worker in self.departed:
            key = (worker.job_id, worker.worker_id, worker.epoch)
            self._count_departed(shard, key, worker.counts[shard], taken(worker))
        if self.departed.forgotten:
            self.lost.add_unknown(shard, None, self.departed.forgotten)

    def _count_departed(self, shard: int, key: tuple[int, int, int], count: int, taken: int) -> None:
        if count == UNKNOWN:
            self.lost.add_unknown(shard, key)
            self.lost.tear(shard, self.namespace_of(key[0]))
            log.warning("shard %d: how many commits of worker %d (epoch %d) it has lost is not known", shard, *key[1:])
            return
        added = self.lost.add_number((shard, *key), count - taken)
        if added:
            self.lost.tear(shard, self.namespace_of(key[0]))
            log.warning(
                "shard %d has lost %d commits of worker %d (epoch %d) of job %s, which has left",
                shard,
                added,
                key[1],
                key[2],
                self.jobs.names.get(key[0], str(key[0])),
            )

    def note_lost(self, shard: int, ranges: Iterable[pb.LostRange]) -> int:
        """Counts the commits that a shard reports as lost, and logs those that were not known.

        Args:
            shard: the index of the shard.
            ranges: the lost ranges of steps or sequences.

        Returns:
            The number of commits that were not known.
        """
        new = 0
        for reported in ranges:
            owner = CommitOwner(shard, reported.job_id, reported.worker_id, reported.epoch, reported.is_steps)
            added = self.lost.add(owner, reported.first, reported.last)
            new += added
            if added:
                self.lost.tear(shard, self.namespace_of(reported.job_id))
                log.warning(
                    "shard %d has lost %d commits of worker %d (epoch %d) of job %s: %s %d to %d were neither saved "
                    "nor sent again",
                    shard,
                    added,
                    reported.worker_id,
                    reported.epoch,
                    self.jobs.names.get(reported.job_id, reported.job_id),
                    "steps" if reported.is_steps else "sequences",
                    reported.first,
                    reported.last,
                )
        return new

    def to_document(self) -> dict[str, Any]:
        """Returns the saved form: plain values for JSON."""
        return {
            "format": FORMAT,
            "cluster_id": self.cluster_id,
            "route": {"epoch": self.slots.epoch, "slot_count": self.slots.slot_count, "runs": self.slots.runs()},
            "lineage": self.shards.lineage,
            "shards": [_shard_document(shard) for shard in self.shards.shards],
            "namespaces": self.registry.namespaces(),
            "tables": self.registry.saved_forms(),
            "next_worker_id": self.jobs.next_worker_id,
            "workers": [
                [job_id, rank, identity.worker_id, identity.epoch, identity.proof_sha256.hex()]
                for job_id, ranks in self.jobs.identities.items()
                for rank, identity in ranks.items()
            ],
            "job_names": [[job_id, name] for job_id, name in self.jobs.names.items()],
            "next_generation": self.jobs.next_generation,
            "jobs": [_job_document(job) for job in self.jobs.jobs.values()],
            "operations": self.operations,
            "rows_source": self.rows_checkpoint,
            "row_sources": to_document(self.row_sources),
            "row_saves": [[url, list(jobs.items())] for url, jobs in self.row_saves.items()],
            "row_configs": self.row_configs,
            "saved_at": self.saved_at,
            "data": [[job_id, data.to_document()] for job_id, data in self.data.jobs.items()],
            "rosters": [[job_id, _roster_document(roster)] for job_id, roster in self.rosters.items()],
            "faults": self.faults.to_document(),
            "lost": self.lost.to_document(),
            "departed": self.departed.to_document(),
            "damage": None if self.damage is None else self.damage.to_document(),
        }

    @staticmethod
    def from_document(document: Any, options: ClusterOptions, *, now: float) -> Cluster:
        """Returns the cluster of a saved form.

        Admitted members get a new lease; candidates have to register again.

        Args:
            document: the saved form.
            options: the options of this start, which must fit the saved cluster.
            now: the present time on the clock of leases, in seconds.

        Raises:
            DataLoss: the document is not of this form.
            FailedPrecondition: the document has another format, or its cluster has other options.
        """
        try:
            check_format(document["format"], OLDEST_FORMAT, FORMAT, "the state", FailedPrecondition)
            route = document["route"]
            _check_same("shards", len(document["shards"]), options.shards)
            _check_same("slot count", route["slot_count"], options.slot_count)
            runs = [(start, shard) for start, shard in route["runs"]]
            cluster = Cluster(
                cluster_id=document["cluster_id"],
                slots=SlotMap.from_runs(route["epoch"], route["slot_count"], runs),
                shards=ShardBook(options.shards, options.shard_lease_sec),
                jobs=Membership(options.worker_lease_sec, options.job_memory_sec),
                checkpoint_roots=options.checkpoint_roots,
            )
            cluster.shards.lineage = document["lineage"]
            for index, saved in enumerate(document["shards"]):
                control, data = (tuple(saved[name]) if saved[name] else None for name in ("control", "data"))
                cluster.shards.remember(index, **{**saved, "control": control, "data": data}, now=now)
            for namespace in document["namespaces"]:
                cluster.registry.namespace_id(namespace)
            for text in document["tables"]:
                cluster.registry.admit(schema_of_message(pb.TableSchema.FromString(base64.b64decode(text))))
            jobs = cluster.jobs
            jobs.next_worker_id = document["next_worker_id"]
            for job_id, rank, worker, epoch, proof_sha256 in document["workers"]:
                identity = Identity(worker, epoch, bytes.fromhex(proof_sha256))
                jobs.identities.setdefault(job_id, {})[rank] = identity
            jobs.names = dict(document["job_names"])
            jobs.next_generation = document["next_generation"]
            for saved in document["jobs"]:
                job = _job_of_document(saved, expires_at=now + options.worker_lease_sec)
                if job.members:  # a job of candidates alone is over, and they have to register again
                    jobs.jobs[job.job_id] = job
            cluster.operations = document["operations"]
            url, name = document["rows_source"] or ("", "")
            cluster.rows_checkpoint = (url, name) if name else None
            cluster.row_sources = of_document(document["row_sources"])
            cluster.data.jobs = {
                job_id: (JobStream if is_of_stream(saved) else JobData).of_document(saved)
                for job_id, saved in document["data"]
            }
            cluster.row_saves = {url: dict(jobs) for url, jobs in document["row_saves"]}
            cluster.row_configs = dict(document["row_configs"])
            cluster.saved_at = document["saved_at"]
            cluster.rosters = {job_id: _roster_of_document(saved) for job_id, saved in document["rosters"]}
            cluster.faults = FaultBook.of_document(document["faults"])
            cluster.lost = LostCommits.of_document(document["lost"])
            cluster.departed = DepartedWorkers.of_document(document["departed"])
            if document["damage"] is not None:
                cluster.damage = Damage.of_document(document["damage"])
        except FailedPrecondition:
            raise
        except (KeyError, TypeError, ValueError, SparserowError) as error:
            raise DataLoss(f"the state is damaged ({type(error).__name__}: {error})") from None
        return cluster


def _check_same(what: str, saved: int, wanted: int) -> None:
    if saved != wanted:
        raise FailedPrecondition(f"the state is of a cluster with {what} {saved}; the command says {wanted}")


def _shard_document(shard: Shard) -> dict[str, Any]:
    return {
        "held": shard.is_live,
        "instance": shard.instance,
        "lineage": shard.lineage,
        "control": shard.control,
        "data": shard.data,
        "pid": shard.pid,
        "restoring": shard.restoring,
        "restores": shard.restores,
    }


def _job_document(job: Job) -> dict[str, Any]:
    return {
        "id": job.job_id,
        "namespace": job.namespace,
        "name": job.name,
        "terms": [job.terms.world_size, job.terms.staleness, job.terms.grad_scale, job.terms.quorum],
        "generation": job.generation,
        "gathered": job.gathered,
        "members": [
            [rank, member.ticket.worker_id, member.ticket.epoch, member.step]
            for rank, member in job.members.items()
            if member.admitted
        ],
    }


def _job_of_document(saved: dict[str, Any], *, expires_at: float) -> Job:
    terms = JobTerms(*saved["terms"])  # an earlier build saved no quorum
    job = Job(saved["id"], saved["namespace"], saved["name"], terms)
    job.generation, job.gathered = saved["generation"], saved["gathered"]
    for rank, worker_id, epoch, step in saved["members"]:
        ticket = Ticket(job.job_id, rank, worker_id, epoch)
        job.members[rank] = Member(ticket, expires_at=expires_at, step=step, admitted=True)
    return job


def _roster_document(roster: Roster) -> dict[str, Any]:
    return {
        "name": roster.name,
        "staleness": roster.staleness,
        "quorum": roster.quorum,
        "generation": roster.generation,
        "operation": roster.operation,
        "spans": [
            [span.worker_id, span.epoch, span.rank, span.first_step, span.until_step, span.final_sequence]
            for span in roster.spans.values()
        ],
    }


def _roster_of_document(saved: dict[str, Any]) -> Roster:
    spans = [Span(*values) for values in saved["spans"]]
    return Roster(
        saved["name"],
        saved["staleness"],
        saved["generation"],
        saved["operation"],
        {span.key: span for span in spans},
        saved.get("quorum"),  # an earlier build saved none
    )
