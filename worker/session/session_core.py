"""The part of a session that the library's own modules use; :class:`Session` is the part that users call."""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable

from ...cpp_ext import _client
from ...proto.errors import FailedPrecondition, InvalidArgument, not_allowed
from ...proto.features.feature_set import FeatureSet
from ...proto.features.kept import FeaturesPolicy
from ...proto.worker_identity import WorkerIdentity
from ..membership.worker_notes import WorkerNotes
from .background_push import BackgroundPush
from .close_at_exit import close_at_exit, forget_at_exit
from .dense_on_servers import DenseOnServers
from .dense_optimizer import DenseOptimizer
from .dense_step import check_gradients
from .group_vote import GroupVote
from .join import check_place_in_join
from .loss_scale import LossScale
from .namespace_features import Fit, agreed_features
from .participant import Participant, Step
from .quorum import check_step
from .rank_rows import RowsOnRanks
from .server_rows import ServerRows
from .session_parts import Catalog, Closeable, DenseSide, Placement
from .session_stats import SessionStats
from .session_tables import SessionTables
from .step import discard_step, end_step, is_voting
from .step_watch import StepWatch
from .tensor_group import TensorGroup
from .trace_requests import TraceRequests
from .tracing import NoTrace, Trace

_log = logging.getLogger(__name__)


class SessionCore(SessionTables):
    """The state of one session, as layers, prefetch, checkpoints and publishing use it.

    Args:
        native: the native half of the session; any thread may use it.
        catalog: the coordinator, or its stand-in, where tables are registered.
        placement: this worker's rank in its job, and the rules of the job.
        on_close: leaves the job within the given number of seconds (None: the deadline of the connection).
        on_fault: reports an error that ends the session to the coordinator; None: there is no coordinator.
        reached: returns the highest step that a worker of the job has committed. None: this worker was in the job
            from the start.
        ranks: returns the ranks of the workers that are in the job; None: this worker is the only one.
        identity: this worker's ids in the cluster; None: the shards are in this process.
        cluster_id: the id of the cluster; None: the shards are in this process.
        notes: takes what this worker says of itself to its job.
        found_tables: the number of rows of each table that the namespace had before the job, None where it is not
            known. ``distribute`` logs a line about these tables. None: it logs nothing.

    Attributes:
        identity: this worker's ids in the cluster; None: the shards are in this process.
        notes: the argument of that name.
        origins: ids of the clusters whose rows the tables hold, as 16 hexadecimal digits: this session's cluster, and
            those of restored checkpoints. Layers share the list.
        found_tables: the argument of that name.
        trace_requests: modules that want the forwards of the session's models traced, such as a prefetch that learns
            which ids its batches hold.
        tensor_group: the ranks that share this worker; None: this rank is a worker by itself.
        batches_aside: the batches of prefetches whose rows were left to their forward.
        batches_unhinted: the batches of prefetches with hints whose keys no shard got.
    """

    def __init__(
        self,
        native: _client.NativeSession,
        catalog: Catalog,
        placement: Placement,
        *,
        on_close: Callable[[float | None], None] | None = None,
        on_fault: Callable[[BaseException], None] | None = None,
        reached: Callable[[], int] | None = None,
        peers: Callable[[], Mapping[int, int]] | None = None,
        identity: WorkerIdentity | None = None,
        cluster_id: int | None = None,
        found_tables: Mapping[str, int | None] | None = None,
        notes: WorkerNotes | None = None,
    ) -> None:
        super().__init__(native, catalog, placement)
        self._process = os.getpid()
        self.identity = identity
        # The newest attempts of the job to save and to restore, which its workers make together and count alike.
        self.saves_begun = 0 if identity is None else identity.saves_begun
        self.restores_begun = 0 if identity is None else identity.restores_begun
        self.refits_begun = 0  # as the workers of the job count them alike: each call to learn features anew
        self.origins = ["" if cluster_id is None else f"{cluster_id:016x}"]
        self.found_tables = found_tables
        self._trace: Trace = NoTrace()
        self._on_close = on_close
        self._on_fault = on_fault
        self.notes = WorkerNotes() if notes is None else notes
        self._reached = reached
        self._peers = peers
        self._pushes = None if placement.staleness == 0 else BackgroundPush(native)
        self._followers: weakref.WeakSet[Closeable] = weakref.WeakSet()
        self._dense_rows: DenseSide | None = None
        self._server_rows = ServerRows(native, self._pushes)
        self._dense_optimizer = DenseOptimizer(self.on_device)
        self._watch = StepWatch(native)
        self.trace_requests: TraceRequests[Any] = TraceRequests()
        self.tensor_group: TensorGroup | None = None
        self.batches_aside = self.batches_unhinted = 0
        close_at_exit(self, is_connected=on_close is not None)

    @property
    def is_distributed(self) -> bool:
        """Whether other ranks vote over a step."""
        return self.placement.world_size > 1 or self.tensor_group is not None

    @property
    def leads(self) -> bool:
        """Whether this rank has the session with the servers, as every rank has that is in no tensor group."""
        return self.tensor_group is None or self.tensor_group.leads

    @property
    def trace(self) -> Trace:
        """The trace that receives the spans of steps; by default one that keeps nothing."""
        return self._trace

    def record(self, trace: Trace) -> None:
        """Sends the spans of steps to ``trace`` from now on; :meth:`end_record` adds those of pulls."""
        self._trace = trace
        self.native.record_pulls()

    def end_record(self) -> None:
        """Adds the spans of pulls, which the native half has timed, to the trace."""
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        for begin, end, step, thread in self.native.take_pull_spans():
            self._trace.add("pull", begin, end, step=step, thread=(thread, names.get(thread, "ended")))

    def step(
        self,
        joinable: Joinable,
        dense: torch.optim.Optimizer | None,
        scale: LossScale | None,
        *,
        allow_empty: bool = False,
        clip_row_norm: float | None = None,
    ) -> bool:
        """Ends a step; see :meth:`Session.step` for the other arguments and errors.

        Args:
            joinable: the session, as torch's Join knows it.
            dense: the optimizer of the dense side; None: there is none here.
            scale: the enabled scaler of the loss; None: the loss is not scaled.
            allow_empty: see :meth:`Session.step`.
            clip_row_norm: see :meth:`Session.step`.
        """
        self.flush()
        self.native.check_usable()
        if clip_row_norm is not None and not 0 < clip_row_norm < math.inf:
            raise not_allowed("session.step.clip_row_norm", clip_row_norm, "> 0, or None")
        if dense is not None:
            check_gradients(dense)
        if self._dense_rows is None:
            self._watch.look_for_forgotten(dense, stacklevel=3)
        check_place_in_join(joinable, dense if self.placement.world_size > 1 else None)
        Join.notify_join_context(joinable)
        check_step(self.placement, dense)
        self.send_learning_rates()
        if self._dense_rows is not None and (dense is not None or clip_row_norm is not None):
            raise InvalidArgument(
                "session.step: the dense tensors are on the servers; call it without dense and clip_row_norm"
            )
        self._check_staged(allow_empty=allow_empty)
        has_ranks, votes = self.device_tables is not None, is_voting(is_distributed=self.is_distributed)
        step = Step(
            self.native.step,
            self.trace,
            dense=dense,
            scale=scale,
            sparse=self._optimizer,
            allow_empty=allow_empty,
            most_norm=math.inf if clip_row_norm is None else clip_row_norm,
            is_voting=votes,
            is_shared=votes or has_ranks,
            raises_nonfinite=scale is None and self.placement.on_nonfinite == "raise",
            note_empty=self._watch.note_empty if self._warns_of_empty and not has_ranks else None,
        )
        try:
            with self._watch.stepping(dense), self.trace.span("session.step", step=step.number):
                is_taken = end_step(self._participants(), step)
            self._watch.warn_of_empty(stacklevel=3)
            return is_taken
        finally:
            self.trace.end_step(self.native.step)

    def _check_staged(self, *, allow_empty: bool) -> None:
        """Raises FailedPrecondition where a step would move no row because no backward reached one."""
        if allow_empty or self._optimizer is None or not self._optimizer.trains_rows or self.native.staged_calls > 0:
            return
        if self._dense_rows is None or not self._dense_rows.has_gradients:
            raise FailedPrecondition(
                "session.step: no backward reached a distributed table in this step; call loss.backward() before it, "
                "with the model in train mode (or pass allow_empty=True)"
            )

    def _participants(self) -> list[Participant]:
        """Returns what takes part in a step, in the order of commits."""
        parts: list[Participant] = [self._server_rows]
        if self.device_tables is not None:
            parts.append(RowsOnRanks(self.device_tables))
        parts.append(self._dense_optimizer)
        if self._dense_rows is not None:
            parts.append(DenseOnServers(self._dense_rows))
        if self.tensor_group is not None:
            parts.append(GroupVote(self.tensor_group))
        return parts

    @property
    def _warns_of_empty(self) -> bool:
        """Whether a step that moves no row of a table is a mistake here."""
        return self.leads and self._dense_rows is None and self._optimizer is not None and self._optimizer.trains_rows

    def watch_model(self, model: torch.nn.Module) -> None:
        """Watches optimizers of this model's parameters for steps that bypass the session; ``distribute`` calls it."""
        self._watch.add_model(model)

    def end_empty_step(self) -> None:
        """Ends a step to which this worker adds nothing. Non-finite gradients of other ranks raise nothing here.

        Raises:
            FailedPrecondition: gradients of this worker wait for a step.
        """
        self.flush()
        if self.native.staged_calls > 0:
            raise FailedPrecondition("Join: the data ended within a step; call session.step after the last backward")
        votes = is_voting(is_distributed=self.is_distributed)
        step = Step(
            self.native.step,
            self.trace,
            allow_empty=True,
            is_voting=votes,
            is_shared=votes,
            raises_nonfinite=False,
        )
        end_step([self._server_rows, self._dense_optimizer], step)

    def flush(self) -> None:
        """Waits until the shards have applied every step taken; see :meth:`Session.flush`."""
        if self._pushes is not None:
            self._pushes.wait()

    def discard(self) -> None:
        """Ends the step without a commit; see :meth:`Session.discard`."""
        self.native.check_usable()
        discard_step(self._participants(), Step(self.native.step, self.trace))

    def drop_gradients(self) -> None:
        """Drops the staged gradients; rows that a forward has read stay."""
        self.on_device.drop_gradients()
        if self.device_tables is not None:
            self.device_tables.drop_gradients()
        self.native.drop_gradients()

    def catch_up(self) -> None:
        """Moves a worker that joined a running job to the step that the other workers have reached by now.

        It has an effect once, before the worker's first lookup in train mode. ``dense_on_servers`` calls it.

        Raises:
            Unavailable: the coordinator cannot be reached.
        """
        reached, self._reached = self._reached, None
        if reached is not None:
            self.native.skip_to(max(self.native.step, reached() + 1))

    def agreed_features(self, features: FeatureSet, fit: Fit, *, policy: FeaturesPolicy = "keep") -> FeatureSet:
        """Returns features with the statistics that the namespace keeps; see :func:`agreed_features`."""
        return agreed_features(self, features, fit, policy=policy)

    def is_lowest_rank(self) -> bool:
        """Returns whether no worker of a lower rank is in the job now.

        Raises:
            Unavailable: the coordinator cannot be reached.
        """
        return self.placement.rank == 0 or (
            self._peers is not None and min(self._peers(), default=-1) >= self.placement.rank
        )

    def lower_rank_begins(self) -> bool:
        """Returns whether a worker of a lower rank is in the job now and before the end of its first step.

        One that has taken a step, or joined workers that had, makes nothing for all any more.

        Raises:
            Unavailable: the coordinator cannot be reached.
        """
        if self.placement.rank == 0 or self._peers is None or (self.identity and self.identity.first_step > 0):
            return False
        return any(rank < self.placement.rank and step <= 0 for rank, step in self._peers().items())

    def check_no_dense_rows(self) -> None:
        """Raises FailedPrecondition when a model's dense tensors are on the servers already."""
        if self._dense_rows is not None:
            raise FailedPrecondition("dense_on_servers: this session has the dense tensors of a model; connect anew")

    def check_no_device_tables(self) -> None:
        """Raises FailedPrecondition when a table is on the devices of the ranks."""
        if self.device_tables is not None and self.device_tables.names:
            raise FailedPrecondition(
                f"dense_on_servers: table {self.device_tables.names[0]!r} has placement 'device', whose ranks step "
                "together; allowed: DistributedDataParallel, or placement 'servers'"
            )

    @property
    def has_dense_rows(self) -> bool:
        """Whether a model's dense tensors are on the servers."""
        return self._dense_rows is not None

    @property
    def dense_ids(self) -> torch.Tensor | None:
        """The ids that the lookup of a dense tower on the servers is given, (rows) int64; None where there is none."""
        return None if self._dense_rows is None else self._dense_rows.ids

    def attach_dense_rows(self, dense_rows: DenseSide) -> None:
        """Sends these tensors' gradients with every commit from now on; ``dense_on_servers`` calls it."""
        self._dense_rows = dense_rows

    def accept_restored_dense(self, *, has_model: bool) -> None:
        """Notes that a restore has set the dense tensors on the servers, and with ``has_model`` the model's."""
        if self._dense_rows is not None:
            self._dense_rows.accept_restored(has_model=has_model)

    def write_dense_buffers(self) -> None:
        """Writes rank 0's buffers of a model whose dense tensors are on the servers, as before a save of their rows."""
        if self._dense_rows is not None and self.placement.rank == 0:
            self._dense_rows.write_buffers()

    def read_dense_rows(self) -> str | None:
        """Copies the newest dense tensors into the model when the servers hold them.

        Returns:
            The name of their table; None when the dense tensors are in this process.
        """
        if self._dense_rows is None:
            return None
        self._dense_rows.pull(train=False)
        return self._dense_rows.table_name

    def stats(self) -> SessionStats:
        """Returns the counters since the session was made."""
        counted = dict.fromkeys(SessionStats.of_python(), 0)
        counted.update(batches_aside=self.batches_aside, batches_unhinted=self.batches_unhinted)
        for part in self._participants():
            for name, more in part.stats().items():
                counted[name] = counted.get(name, 0) + more
        return SessionStats(**counted)

    def close(self) -> None:
        """Closes the session; see :meth:`Session.close`."""
        refusal = self.end()
        if refusal:
            raise FailedPrecondition(f"{refusal}; the session was closed and the gradients are lost")

    def report_fault(self, error: BaseException | None) -> None:
        """Reports an error that ends the session's ``with`` block to the coordinator, for ``sparserow status``."""
        if self._on_fault is not None and isinstance(error, Exception) and os.getpid() == self._process:
            self._on_fault(error)

    def end_at_exit(self, error: BaseException | None, deadline_sec: float) -> None:
        """Closes the session because this process ends, and reports ``error`` to the coordinator.

        Args:
            error: the error that ends the process; None: it ends well.
            deadline_sec: how long leaving the job may take, in seconds.

        Raises:
            FailedPrecondition: an optimizer stepped in place of ``session.step``, so rows were not trained. It is
                not raised when ``error`` ends the process.
        """
        if os.getpid() != self._process or self.native.is_closed:
            return
        refusal = self.native.lookup_refusal
        unsent = FailedPrecondition(f"{refusal}; the process ended and the gradients are lost") if refusal else None
        fault = unsent if error is None else error
        if self._on_fault is not None and isinstance(fault, Exception):
            self._on_fault(fault)
        self.end(deadline_sec)
        if error is None and unsent is not None:
            raise unsent

    def end(self, deadline_sec: float | None = None) -> str:
        """Closes the session.

        Args:
            deadline_sec: how long leaving the job may take, in seconds; None: the deadline of the connection.

        Returns:
            The reason why lookups were refused while gradients waited; "" when they were not refused.
        """
        is_ours = os.getpid() == self._process
        forget_at_exit(self)
        self._watch.close()
        staged = self.native.staged_calls if is_ours and not self.native.is_closed else 0
        refusal = self.native.lookup_refusal if staged else ""
        if staged and not refusal:
            _log.warning("the session is closed within a step: the gradients of %d calls of backward are lost", staged)
        try:
            for follower in list(self._followers) if is_ours else ():
                follower.close()
            if self._pushes is not None and is_ours:
                self._pushes.close()
        finally:
            self.native.close()
            if self.device_tables is not None and is_ours:
                self.device_tables.close()
            if self.tensor_group is not None and is_ours:
                self.tensor_group.close()
            on_close, self._on_close = self._on_close, None
            if on_close is not None and is_ours:
                on_close(deadline_sec)
        return refusal

    def follow(self, follower: Closeable) -> None:
        """Closes ``follower`` before the session is closed. The session holds it weakly."""
        self._followers.add(follower)
