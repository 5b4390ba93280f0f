"""A worker's session: its tables, its clock, and the end of each step."""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ...cpp_ext import _client
from ...proto.closing import Closing
from ...proto.control import WorkerIdentity
from ...proto.errors import FailedPrecondition, InvalidArgument
from ..id_trace.forward_trace import TraceRequests
from .background_push import BackgroundPush
from .close_at_exit import close_at_exit, forget_at_exit
from .join import (
    SessionJoinHook,
    check_place_in_join,
    checked_micro_batches,
    collective_device,
    default_group,
)
from .loss_scale import LossScale
from .session_parts import Catalog, Closeable, DenseSide, Placement
from .session_stats import SessionStats
from .session_tables import SessionTables
from .step_watch import StepWatch
from .tracing import NoTrace, Trace
from .transaction import end_step
from .wrapped_optimizer import WrappedOptimizer, checked_dense, unwrapped

_log = logging.getLogger(__name__)


class Session(SessionTables, Closing, Joinable):
    """Made by :func:`connect`. Explicit, and closed by ``close()`` or a ``with`` statement.

    The native half may be used from any thread; ``step`` belongs to the thread that trains. After ``fork`` the
    child's copy raises :class:`FailedPrecondition` on use, and closing it leaves the parent's alone. For workers with
    unequal numbers of batches it goes into torch's ``Join`` (worker/session/join.py).
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
        ranks: Callable[[], Sequence[int]] | None = None,
        identity: WorkerIdentity | None = None,
        cluster_id: int | None = None,
        found_tables: Mapping[str, int | None] | None = None,
    ) -> None:
        super().__init__(native, catalog, placement)
        self._process = os.getpid()
        self.identity = identity  # None: its shards are in this process
        # Ids of the clusters whose rows the tables hold: its own, and those of restored checkpoints. Layers share it.
        self.origins = ["" if cluster_id is None else f"{cluster_id:016x}"]
        # Rows of the tables that distribute is to speak of when it finds them; None where it says nothing.
        self.found_tables = found_tables
        self._trace: Trace = NoTrace()
        self._on_close = on_close
        self._on_fault = on_fault
        self._reached = reached
        self._ranks = ranks
        self._pushes = None if placement.staleness == 0 else BackgroundPush(native)
        self._followers: weakref.WeakSet[Closeable] = weakref.WeakSet()
        self._dense_rows: DenseSide | None = None
        self._watch = StepWatch(native)
        # What wants the forwards of the session's models traced: a prefetch that learns which ids its batches hold.
        self.trace_requests = TraceRequests()
        close_at_exit(self, is_connected=on_close is not None)

    @property
    def rank(self) -> int:
        """This worker's place in the order of reduction."""
        return self.placement.rank

    @property
    def world_size(self) -> int:
        """Workers of the job when it began."""
        return self.placement.world_size

    @property
    def current_step(self) -> int:
        """The step that the next commit ends."""
        return self.native.step

    @property
    def trace(self) -> Trace:
        """Where the spans of steps go; by default nowhere."""
        return self._trace

    def record(self, trace: Trace) -> None:
        """Has the spans of steps kept in ``trace`` from now on, those of pulls until :meth:`end_record`."""
        self._trace = trace
        self.native.record_pulls()

    def end_record(self) -> None:
        """Adds the spans of pulls, which the native half times, to the trace."""
        names = {thread.native_id: thread.name for thread in threading.enumerate()}
        for begin, end, step, thread in self.native.take_pull_spans():
            self._trace.add("pull", begin, end, step=step, thread=(thread, names.get(thread, "ended")))

    def step(
        self,
        dense: torch.optim.Optimizer | None = None,
        scaler: GradScaler | None = None,
        *,
        allow_empty: bool = False,
        clip_row_norm: float | None = None,
    ) -> bool:
        """Ends the step: the dense update and the sparse commit both happen, or neither.

        Gradients staged by backward since the last step (of all micro-batches) are unscaled, checked and
        committed; then ``dense`` steps, through ``scaler`` when one is given, which is also updated. Afterwards
        the gradients of both sides are gone, whatever the outcome: ``dense.zero_grad()`` is called here.

        Args:
            dense: the optimizer of the model's local parameters; None after :func:`dense_on_servers`.
            scaler: the ``torch.amp.GradScaler`` that scaled the loss. A step that it skips is silent, as torch's.
            allow_empty: commit although no backward reached a distributed table.
            clip_row_norm: a row's gradient, summed over this worker's step and unscaled, is shortened to this L2 norm
                where it is longer; before it is averaged with the other workers'. Dense ones are clipped by torch's
                ``clip_grad_norm_`` before this call.

        Returns:
            Whether the step was taken; False when it was skipped (by the scaler, or ``on_nonfinite="skip"``).

        Raises:
            NonFiniteGradient: a gradient, sparse or dense, of this rank or another, has NaN or Inf; the model and
                the tables are as before and the session can go on. Not with a scaler or ``on_nonfinite="skip"``.
            FailedPrecondition: no backward reached a table (and not ``allow_empty``).
            InvalidArgument: ``clip_row_norm`` is not above 0; ``dense`` or ``clip_row_norm`` although the dense
                tensors are on the servers; within ``Join`` the session stands before the DDP model, or ``dense`` is
                a ``ZeroRedundancyOptimizer``.
            ResourceExhausted, Unavailable, ...: a shard refused; nothing was applied anywhere.
            Fenced: this worker has lost its place in the job; its text says where the step may have been applied.
            DeadlineExceeded: the outcome is unknown; the session can only be closed. Unless ``staleness`` is 0 the
                last phase of a commit is sent in the background, and its error raised by the next ``step``,
                ``flush`` or ``close``.
        """
        scale = LossScale(scaler) if scaler is not None and scaler.is_enabled() else None
        return self.step_with(
            unwrapped(self, dense, scaler), scale, allow_empty=allow_empty, clip_row_norm=clip_row_norm
        )

    def step_with(
        self,
        dense: torch.optim.Optimizer | None,
        scale: LossScale | None,
        *,
        allow_empty: bool = False,
        clip_row_norm: float | None = None,
    ) -> bool:
        """What :meth:`step` and the optimizers of :meth:`wrap` call."""
        self.flush()
        self.native.check_usable()
        if clip_row_norm is not None and not 0 < clip_row_norm < math.inf:
            raise InvalidArgument(
                f"session.step: clip_row_norm {clip_row_norm!r} is not allowed; allowed: > 0, or None"
            )
        check_place_in_join(self, dense if self.world_size > 1 else None)
        Join.notify_join_context(self)
        self.send_learning_rates()
        try:
            if self._dense_rows is not None:
                if dense is not None or clip_row_norm is not None:
                    raise InvalidArgument(
                        "session.step: the dense tensors are on the servers; call it without dense and clip_row_norm"
                    )
                self._dense_rows.stage()
            with self._watch.stepping(dense), self.trace.span("session.step", step=self.current_step):
                return end_step(
                    self.native,
                    self._optimizer,
                    dense=dense,
                    scale=scale,
                    allow_empty=allow_empty,
                    is_distributed=self.world_size > 1,
                    on_nonfinite=self.placement.on_nonfinite,
                    clip_row_norm=clip_row_norm,
                    pushes=self._pushes,
                    trace=self.trace,
                )
        finally:
            self._end_dense_step()
            self.trace.end_step(self.current_step)

    def wrap(
        self, dense: torch.optim.Optimizer, *, scaler: GradScaler | None = None, clip_row_norm: float | None = None
    ) -> WrappedOptimizer:
        """An optimizer whose ``step()`` is this session's, for loops that are not yours: ``fit()``, Lightning.

        Its parameter groups and its ``state_dict`` are those of ``dense``; the rates of the tables stay in
        ``session.optimizer``. ``zero_grad()`` drops the gradients of the rows too.

        Args:
            dense: the optimizer of the model's local parameters.
            scaler: the ``torch.amp.GradScaler`` whose ``step`` the loop calls, and that it updates; None: none.
            clip_row_norm: as that of :meth:`step`.

        Raises:
            InvalidArgument: ``dense`` is no optimizer, is wrapped already, or needs a closure, as LBFGS does.
        """
        return WrappedOptimizer(self, checked_dense(self, dense), scaler=scaler, clip_row_norm=clip_row_norm)

    def watch_model(self, model: torch.nn.Module) -> None:
        """Counts optimizers of this model's parameters as this session's business; ``distribute`` calls it."""
        self._watch.add_model(model)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What torch's ``Join`` calls.

        Args:
            kwargs: of ``Join``. ``micro_batches``: forwards of each step (default 1), where the others accumulate.

        Raises:
            InvalidArgument: ``divide_by_initial_world_size=False``, or ``micro_batches`` below 1.
        """
        return SessionJoinHook(self.end_empty_step, checked_micro_batches(kwargs))

    @property
    def join_device(self) -> torch.device:
        """Of the collective calls."""
        return collective_device()

    @property
    def join_process_group(self) -> Any:
        """The default group.

        Raises:
            FailedPrecondition: torch.distributed is not initialised.
        """
        return default_group()

    def end_empty_step(self) -> None:
        """This worker's part of a step to which it has nothing to add; refused gradients are the others' to report."""
        self.flush()
        if self.native.staged_calls > 0:
            raise FailedPrecondition("Join: the data ended within a step; call session.step after the last backward")
        end_step(
            self.native,
            None,
            dense=None,
            scale=None,
            allow_empty=True,
            is_distributed=self.world_size > 1,
            on_nonfinite="skip",
            pushes=self._pushes,
            trace=self.trace,
        )

    def flush(self) -> None:
        """Waits until the shards have applied every step taken; at staleness 0 they have when ``step`` returns.

        Raises:
            DeadlineExceeded, Unavailable: the outcome of the last step is unknown; the session can only be closed.
        """
        if self._pushes is not None:
            self._pushes.wait()

    def discard(self) -> None:
        """Ends the step without a commit: rows and staged gradients are forgotten, the clock stays."""
        self.native.check_usable()
        self.native.abort()
        self._end_dense_step()

    def catch_up(self) -> None:
        """Takes a worker that joined a running job to the step that the others have reached by now; once, before its
        first lookup in train mode. ``dense_on_servers`` calls it.

        Raises:
            Unavailable: the coordinator cannot be reached.
        """
        reached, self._reached = self._reached, None
        if reached is not None:
            self.native.skip_to(max(self.native.step, reached() + 1))

    def is_lowest_rank(self) -> bool:
        """Whether no worker of a lower rank is in the job now.

        Raises:
            Unavailable: the coordinator cannot be reached.
        """
        return self.rank == 0 or (self._ranks is not None and min(self._ranks(), default=-1) >= self.rank)

    def check_no_dense_rows(self) -> None:
        """Raises FailedPrecondition when a model's dense tensors are on the servers already."""
        if self._dense_rows is not None:
            raise FailedPrecondition("dense_on_servers: this session has the dense tensors of a model; connect anew")

    def attach_dense_rows(self, dense_rows: DenseSide) -> None:
        """Sends these tensors' gradients with every commit; what ``dense_on_servers`` calls."""
        self._dense_rows = dense_rows

    def read_dense_rows(self) -> str | None:
        """Gives the model the newest dense tensors where they are on the servers; their table's name, or None."""
        if self._dense_rows is None:
            return None
        self._dense_rows.pull(train=False)
        return self._dense_rows.table_name

    def stats(self) -> SessionStats:
        """Counters since the session was made."""
        return SessionStats(**self.native.stats())

    def close(self) -> None:
        """Ends what prefetches, leaves the job and forgets the tables. Idempotent.

        Gradients of a step in progress are dropped with a warning. In a forked child the copy forgets its tables; the
        parent stays in the job. A session that is open when its process ends is closed then (close_at_exit.py).

        Raises:
            FailedPrecondition: an optimizer stepped in place of ``session.step``, so rows were not trained.
            DeadlineExceeded, Unavailable: the outcome of the last step is unknown.
                The session is closed all the same.
        """
        refusal = self._end()
        if refusal:
            raise FailedPrecondition(f"{refusal}; the session was closed without them")

    def end_at_exit(self, error: BaseException | None, deadline_sec: float) -> None:
        """What the end of this process calls: reports ``error``, where it is one, and closes.

        Raises:
            FailedPrecondition: as :meth:`close`, unless ``error`` ends the process.
        """
        if os.getpid() != self._process or self.native.is_closed:
            return
        refusal = self.native.lookup_refusal
        unsent = FailedPrecondition(f"{refusal}; the process ended without them") if refusal else None
        fault = unsent if error is None else error
        if self._on_fault is not None and isinstance(fault, Exception):
            self._on_fault(fault)
        self._end(deadline_sec)
        if error is None and unsent is not None:
            raise unsent

    def _end(self, deadline_sec: float | None = None) -> str:
        """Closes; returns why lookups were refused, "" where they were not. ``deadline_sec``: to leave the job."""
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
            on_close, self._on_close = self._on_close, None
            if on_close is not None and is_ours:
                on_close(deadline_sec)
        return refusal

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes it; an error that ends the ``with`` block is told to the coordinator, for ``sparserow status``."""
        if self._on_fault is not None and isinstance(error, Exception) and os.getpid() == self._process:
            self._on_fault(error)
        if error is None:
            self.close()
        else:
            self._end()  # the error that ends the block counts

    def follow(self, follower: Closeable) -> None:
        """Has ``follower`` closed before the session is; held weakly."""
        self._followers.add(follower)

    def __reduce__(self) -> Any:
        raise FailedPrecondition("a session cannot be copied or pickled: connect in each process")

    def _end_dense_step(self) -> None:
        if self._dense_rows is not None:
            self._dense_rows.end_step()
