"""The backend whose tables are on parameter servers; it uses only what a user of the package could call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from ...proto import control_pb2 as pb
from ...proto.config.job import JobConfig
from ...proto.control import ControlClient
from ...proto.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument
from ...proto.names import is_model_table
from ..api.session import Session
from ..data import NamedBatch
from ..layers.deferred import deferred
from ..layers.dense_rows import DenseRows
from ..session.tracing import Trace
from .job_tables import ChoosePlacements, JobTables
from .training_backend import OnHost, clip_dense, dense_optimizer, keys_on_host

_END_DEADLINE_SEC = 1800.0  # how long rank 0 waits at the end of a job for workers that are behind
_POLL_SEC = 0.1
_PATIENCE_SEC = 20.0


_TIER_COUNTS = (
    "hits",
    "misses",
    "brought_ahead",
    "rows_evicted",
    "file_bytes",
    "reads",
    "rows_read",
    "bytes_read",
    "read_sec",
    "writes",
    "rows_written",
    "bytes_written",
    "write_sec",
)


def _tiers_of(shards: Iterable[pb.ShardStatus]) -> dict[str, float]:
    """Returns the sums of the counts over the shards that have an SSD; {} when no shard has one."""
    tiers = [shard.tier for shard in shards if shard.HasField("tier")]
    return {name: sum(getattr(tier, name) for tier in tiers) for name in _TIER_COUNTS} if tiers else {}


class PsBackend:
    """A backend that keeps tables of at least ``model.min_rows`` rows on the cluster.

    Such tables are never allocated in this process.

    Args:
        job: the job, with the model, the optimizers and the seed.
        session: the session in the job's namespace; the caller closes it.
        coordinator: ``HOST:PORT`` of the coordinator, which is asked for the counts of the result.
        device: the device of the model; None: the host.
        choose: chooses the placement of tables with placement auto; None: they are on the servers.

    Raises:
        InvalidArgument: ``train.prefetch_hints`` is given, but no shard has an SSD.
    """

    def __init__(
        self,
        job: JobConfig,
        session: Session,
        coordinator: str,
        *,
        device: torch.device | None = None,
        choose: ChoosePlacements | None = None,
    ) -> None:
        self._job, self._session, self._coordinator = job, session, coordinator
        self._device, self._choose = device or torch.device("cpu"), choose
        self._dense: torch.optim.Optimizer | None = None
        self._dense_rows: DenseRows | None = None
        self.on_host: OnHost | None = None
        self._tables: JobTables | None = None
        self._refused = self._missed = 0  # steps of the session until the last call of passed_over
        with self._control() as client:
            shards = client.status().shards
        if job.train.prefetch_hints and not any(shard.HasField("tier") for shard in shards):
            raise InvalidArgument(
                f"train.prefetch_hints: it has no effect, as no shard of {coordinator} has an SSD; allowed: 0"
            )
        self.shards = len(shards)
        self._tiers_before = _tiers_of(shards)

    def _control(self) -> ControlClient:
        """Returns a client that waits for a coordinator that is being restarted; training rarely needs it."""
        return ControlClient(self._coordinator, patience_sec=_PATIENCE_SEC)

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Builds the model with deferred tables, and swaps them for distributed layers.

        Raises:
            FailedPrecondition: the cluster has a table of the same name with another schema.
        """
        model, train = self._job.model, self._job.train
        with deferred(min_rows=model.min_rows):
            plain = make()
        self.on_host = keys_on_host(self._job, plain)
        tables = self._tables = JobTables(self._job, plain)
        options = tables.options(self._choose)
        if any(table.placement == "device" for table in options.values()):
            plain.to(self._device)  # where its tables are made
        made = self._session.distribute(
            plain,
            optimizer=train.row_optimizer.row_optimizer(),
            min_rows=model.min_rows,
            tables=options,
            bind=tables.bind,
        )
        tables.fill_frozen(self._session)
        return made

    def start(self, model: nn.Module) -> None:
        """Makes the optimizer of the dense tower; with ``train.dense`` ps, moves the tower to the servers instead."""
        train = self._job.train
        self._device = next((parameter.device for parameter in model.parameters()), self._device)
        if train.dense == "ps":
            optimizer = train.dense_optimizer.row_optimizer()
            self._dense_rows = self._session.dense_on_servers(model, optimizer=optimizer)
        else:
            self._dense = dense_optimizer(train, [each for each in model.parameters() if each.numel() > 0])

    def batches(self, reader: Iterable[NamedBatch]) -> Iterable[NamedBatch]:
        """Returns the reader's batches, prefetched when the job asks for it."""
        train = self._job.train
        if train.prefetch == 0:
            return reader
        return self._session.prefetch(
            reader,
            depth=train.prefetch,
            device=None if self._device.type == "cpu" else self._device,
            on_host=None if self._device.type == "cpu" else self.on_host,
            hints=train.prefetch_hints,
        )

    @property
    def session(self) -> Session:
        """The session of the job."""
        return self._session

    @property
    def forwards_meet(self) -> bool:
        """Whether the towers are in parts, or a table is on the devices of the ranks."""
        return self._job.train.parts is not None or self._session.core.has_device_tables

    @property
    def dense(self) -> torch.optim.Optimizer | None:
        """The optimizer of the dense tower; None when the tower is on the servers."""
        return self._dense

    @property
    def trace(self) -> Trace:
        """The trace of the session."""
        return self._session.core.trace

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizer of the dense tower, when it is in this process, and the session's with the tables' rates."""
        return (self._session.optimizer,) if self._dense is None else (self._dense, self._session.optimizer)

    def step(self, scaler: GradScaler | None) -> bool:
        """Ends a step: the dense update and the commit of rows both happen, or neither.

        A worker with an empty batch commits no gradients but takes part in the step.
        """
        dense, train = self._dense, self._job.train
        if dense is None and self._dense_rows is None:
            raise FailedPrecondition("PsBackend: call start first")
        if dense is not None and train.clip_norm is not None:
            clip_dense(dense, train.clip_norm, scaler)
        return self._session.step(dense, scaler, allow_empty=True, clip_row_norm=train.clip_row_norm)

    def passed_over(self) -> int | None:
        """Returns how many steps the session's clock passed over when the last step had its quorum without it.

        The result is None when the step was not taken for another reason.
        """
        stats = self._session.stats()
        is_outside, missed = stats.refused_steps > self._refused, stats.missed_steps - self._missed
        self._refused, self._missed = stats.refused_steps, stats.missed_steps
        return missed if is_outside else None

    def settle(self, *, is_end: bool) -> None:
        """With dense tensors on the servers, pulls them under the clock; at the end, rank 0 waits for the others."""
        if self._dense_rows is None:
            return
        self._session.flush()
        self._dense_rows.pull()
        self._session.discard()  # the pulled tensors would be too old for the next step
        if is_end and self._session.rank == 0 and self._session.world_size > 1:
            self._wait_for_the_others()

    def _wait_for_the_others(self) -> None:
        """Waits until every other worker has left the job or has passed this worker's last step."""
        mine, deadline = self._session.current_step, time.monotonic() + _END_DEADLINE_SEC
        with self._control() as client:
            while True:
                jobs = [job for job in client.status().jobs if job.namespace == job.name == self._job.name]
                others = [m for job in jobs for m in job.members if m.rank != self._session.rank and m.step < mine]
                if not others:
                    return
                if time.monotonic() > deadline:
                    ranks = ", ".join(str(member.rank) for member in others)
                    raise DeadlineExceeded(f"train: ranks {ranks} did not finish within {_END_DEADLINE_SEC:.0f} s")
                time.sleep(_POLL_SEC)

    def cache(self) -> dict[str, int]:
        """Returns the counts of the session's row cache."""
        return {} if self._job.train.cache is None else self._session.stats().cache()

    def quorum(self) -> dict[str, int]:
        """Returns how many steps had their quorum without this worker, and how many it passed over."""
        if self._job.train.quorum is None:
            return {}
        stats = self._session.stats()
        return {"refused_steps": stats.refused_steps, "missed_steps": stats.missed_steps}

    def tiers(self) -> dict[str, float]:
        """Returns the counts of all shards with an SSD; the work of other jobs on the cluster is included."""
        with self._control() as client:
            now = _tiers_of(client.status().shards)
        return {
            name: value if name == "file_bytes" else value - self._tiers_before.get(name, 0.0)
            for name, value in now.items()
        }

    def rows(self) -> int:
        """Returns the number of rows of this job's tables: those that the servers hold, and all of those on devices."""
        with self._control() as client:
            shards, own = client.status().shards, self._session.namespace
        there = self._session.core.device_tables
        on_servers: int = sum(
            usage.rows for shard in shards for usage in shard.tables if is_model_table(usage.name, own)
        )
        return on_servers + (0 if there is None else there.rows)

    def untrained(self) -> list[str]:
        """Returns the tables without a row on the servers that this job was to train."""
        return self._without_rows(frozen=False)

    def empty_frozen(self) -> list[str]:
        """Returns the frozen tables without a row on the servers."""
        return self._without_rows(frozen=True)

    def _without_rows(self, *, frozen: bool) -> list[str]:
        core = self._session.core
        names = [group["name"] for group in self._session.optimizer.param_groups if group["frozen"] == frozen]
        if not names:
            return []
        with self._control() as client:
            usages = [usage for shard in client.status().shards for usage in shard.tables if usage.rows]
        there = {usage.name.removeprefix(f"{self._session.namespace}/") for usage in usages}
        return [name for name in names if name not in there and not core.is_on_devices(name)]

    def shard_losses(self) -> tuple[int, int]:
        """Returns how often a shard was restored while others went on, and how many commits were lost by it."""
        with self._control() as client:
            shards = client.status().shards
        return sum(shard.restores for shard in shards), sum(shard.commits_lost for shard in shards)

    def staleness(self) -> dict[str, dict[str, int]]:
        """Returns the staleness of the pulls of each table in this job's namespace, over all shards and workers."""
        found: dict[str, dict[str, int]] = {}
        with self._control() as client:
            usages = [usage for shard in client.status().shards for usage in shard.tables]
        for usage in usages:
            namespace, _, name = usage.name.partition("/")
            if namespace == self._job.name and usage.staleness:
                buckets = found.setdefault(name, {})
                for bucket in usage.staleness:
                    bound = "inf" if bucket.at_most == 2**64 - 1 else str(bucket.at_most)
                    if bucket.pulls:
                        buckets[bound] = buckets.get(bound, 0) + bucket.pulls
        return found
