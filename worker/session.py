"""A worker's session: its tables, its clock, and the end of each step."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ..cpp_ext import _client
from ..proto.control import WorkerIdentity
from ..proto.errors import FailedPrecondition, InvalidArgument, NotFound
from ..proto.schema import Constant, Dtype, Init, RowOptimizer, RowPolicy, TableSchema
from .background_push import BackgroundPush
from .cache.settings import storage_on
from .join import SessionJoinHook, check_place_in_join, checked_micro_batches, collective_device, default_group
from .session_parts import Catalog, Closeable, DenseSide, Placement
from .session_stats import SessionStats
from .sparse_optimizer import SparseOptimizer
from .table import TableRows
from .tracing import NoTrace, Trace
from .transaction import end_step


class Session(Joinable):
    """Made by :func:`connect`. Explicit, and closed by ``close()`` or a ``with`` statement.

    The native half may be used from any thread; ``step`` belongs to the thread that trains. After ``fork`` the
    child's copy raises :class:`FailedPrecondition` on use, and closing it leaves the parent's alone. For workers with
    unequal numbers of batches it goes into torch's ``Join`` (worker/join.py).
    """

    def __init__(
        self,
        native: _client.NativeSession,
        catalog: Catalog,
        placement: Placement,
        *,
        on_close: Callable[[], None] | None = None,
        reached: Callable[[], int] | None = None,
        ranks: Callable[[], Sequence[int]] | None = None,
        identity: WorkerIdentity | None = None,
        cluster_id: int | None = None,
    ) -> None:
        super().__init__()
        self._process = os.getpid()
        self.native = native
        self.catalog = catalog
        self.placement = placement
        self.identity = identity  # None: its shards are in this process
        # Ids of the clusters whose rows the tables hold: its own, and those of restored checkpoints. Layers share it.
        self.origins = ["" if cluster_id is None else f"{cluster_id:016x}"]
        self._trace: Trace = NoTrace()
        self._on_close = on_close
        self._reached = reached
        self._ranks = ranks
        self._optimizer: SparseOptimizer | None = None
        self._schemas: dict[str, TableSchema] = {}
        self._sent_rates: dict[str, float] = {}
        self._pushes = None if placement.staleness == 0 else BackgroundPush(native)
        self._followers: weakref.WeakSet[Closeable] = weakref.WeakSet()
        self._dense_rows: DenseSide | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def namespace(self) -> str:
        """Of every table this session names."""
        return self.placement.namespace

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

    @property
    def optimizer(self) -> SparseOptimizer:
        """Learning rates by table, for ``torch.optim.lr_scheduler``.

        Raises:
            FailedPrecondition: before ``distribute``, as there is no table yet.
        """
        if self._optimizer is None:
            raise FailedPrecondition("session.optimizer: there is no table yet; call distribute(model, session) first")
        return self._optimizer

    def learning_rates(self) -> dict[str, float]:
        """Of each table of the models, by name; {} before there is one."""
        return {} if self._optimizer is None else self._optimizer.learning_rates()

    def set_learning_rates(self, rates: Mapping[str, float]) -> None:
        """Sets those of the tables that are named; tables that no model uses are passed over."""
        for group in self._optimizer.param_groups if self._optimizer is not None else ():
            group["lr"] = rates.get(group["name"], group["lr"])

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
            DeadlineExceeded: the outcome is unknown; the session can only be closed. Unless ``staleness`` is 0 the
                last phase of a commit is sent in the background, and its error raised by the next ``step``,
                ``flush`` or ``close``.
        """
        self.flush()
        self.native.check_usable()
        if clip_row_norm is not None and not 0 < clip_row_norm < math.inf:
            raise InvalidArgument(
                f"session.step: clip_row_norm {clip_row_norm!r} is not allowed; allowed: > 0, or None"
            )
        check_place_in_join(self, dense if self.world_size > 1 else None)
        Join.notify_join_context(self)
        self._send_learning_rates()
        try:
            if self._dense_rows is not None:
                if dense is not None or clip_row_norm is not None:
                    raise InvalidArgument(
                        "session.step: the dense tensors are on the servers; call it without dense and clip_row_norm"
                    )
                self._dense_rows.stage()
            with self.trace.span("session.step", step=self.current_step):
                return end_step(
                    self.native,
                    self._optimizer,
                    dense=dense,
                    scaler=scaler,
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

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What torch's ``Join`` calls.

        Args:
            kwargs: of ``Join``. ``micro_batches``: forwards of each step (default 1), where the others accumulate.

        Raises:
            InvalidArgument: ``divide_by_initial_world_size=False``, or ``micro_batches`` below 1.
        """
        return SessionJoinHook(self._end_empty_step, checked_micro_batches(kwargs))

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

    def _end_empty_step(self) -> None:
        """This worker's part of a step that only others feed; refused gradients are theirs to report."""
        self.flush()
        if self.native.staged_calls > 0:
            raise FailedPrecondition("Join: the data ended within a step; call session.step after the last backward")
        end_step(
            self.native,
            None,
            dense=None,
            scaler=None,
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

    def place_cache(self, model: torch.nn.Module) -> None:
        """Has the row cache's rows where its ``storage`` says for this model; what ``distribute`` and
        ``lift_embeddings`` call. Nothing without a cache.

        Raises:
            InvalidArgument: the model's device cannot hold the cache.
            FailedPrecondition: Triton is not installed.
        """
        cache = self.placement.cache
        if cache is None:
            return
        on_cuda = (parameter.device for parameter in model.parameters() if parameter.is_cuda)
        make = storage_on(cache, next(on_cuda, torch.device("cpu")))
        if make is not None:
            self.native.set_cache_storage(make)

    def attach_dense_rows(self, dense_rows: DenseSide) -> None:
        """Sends these tensors' gradients with every commit; what ``dense_on_servers`` calls."""
        self._dense_rows = dense_rows

    def create_table(
        self,
        name: str,
        *,
        dim: int,
        optimizer: RowOptimizer,
        dtype: Dtype = "float32",
        init: Init | None = None,
        seed: int = 0,
        policy: RowPolicy | None = None,
    ) -> TableRows:
        """Creates a table for use by key, or finds it.

        Args:
            name: within the session's namespace.
            dim: columns.
            optimizer: runs on the shards; its ``lr`` is the default of ``push``.
            dtype: of stored weights.
            init: of rows nobody has pushed to; None is zeros.
            seed: of initial rows.
            policy: which keys get a row and which rows go again; None: every key, and none.

        Raises:
            FailedPrecondition: it exists with another schema (names the field).
        """
        self.native.check_usable()
        schema = TableSchema(
            namespace=self.namespace,
            name=name,
            dim=dim,
            optimizer=optimizer,
            dtype=dtype,
            init=Constant() if init is None else init,
            seed=seed,
            policy=RowPolicy() if policy is None else policy,
        )
        return self._rows_of(self.catalog.create_table(schema))

    def table(self, name: str) -> TableRows:
        """Rows of a table by key.

        Raises:
            NotFound: the namespace has no such table (lists those it has).
        """
        self.native.check_usable()
        if name not in self._schemas:
            for schema in self.catalog.list_tables(self.namespace):
                self._schemas.setdefault(schema.name, schema)
        if name not in self._schemas:
            known = ", ".join(sorted(self._schemas)) or "none"
            raise NotFound(f"table {name!r} is not in namespace {self.namespace!r}; tables there: {known}")
        return self._rows_of(self._schemas[name])

    def bind(self, schema: TableSchema, *, num_rows: int, anchor: Tensor, cached: bool = True) -> str:
        """Makes a registered table known to the ops of this process; what ``distribute`` calls.

        Args:
            schema: as the catalog returned it.
            num_rows: ids must be below.
            anchor: of the twin; its parameter group carries the learning rate.
            cached: whether the session's row cache, where it has one, keeps its rows.

        Returns:
            The binding's name, ``namespace/table``.

        Raises:
            FailedPrecondition: the table is bound in this process already.
            InvalidArgument: ``cache.bytes`` is too small for one more table (says the least).
        """
        if schema.namespace != self.namespace:
            raise InvalidArgument(f"table {schema.full_name!r}: the session's namespace is {self.namespace!r}")
        rate = schema.optimizer.lr
        self.native.bind(
            schema.full_name,
            table_id=schema.id,
            schema_version=schema.version,
            dim=schema.dim,
            num_rows=num_rows,
            lr=rate,
            cached=cached,
        )
        self._schemas[schema.name] = schema
        self._sent_rates[schema.name] = rate
        if self._optimizer is None:
            self._optimizer = SparseOptimizer(schema.name, anchor, lr=rate)
        else:
            self._optimizer.add_table(schema.name, anchor, lr=rate)
        return schema.full_name

    def bound_tables(self) -> Sequence[str]:
        """Names of the tables that models of this process use."""
        return tuple(self._sent_rates)

    def stats(self) -> SessionStats:
        """Counters since the session was made."""
        return SessionStats(**self.native.stats())

    def close(self) -> None:
        """Ends what prefetches, leaves the job and forgets the tables; a step in progress is dropped. Idempotent.

        In a forked child the copy forgets its tables; the parent stays in the job.

        Raises:
            DeadlineExceeded, Unavailable: the outcome of the last step is unknown. The session is closed all the same.
        """
        is_ours = os.getpid() == self._process
        try:
            for follower in list(self._followers) if is_ours else ():
                follower.close()
            if self._pushes is not None and is_ours:
                self._pushes.close()
        finally:
            self.native.close()
            on_close, self._on_close = self._on_close, None
            if on_close is not None and is_ours:
                on_close()

    def follow(self, follower: Closeable) -> None:
        """Has ``follower`` closed before the session is; held weakly."""
        self._followers.add(follower)

    def __reduce__(self) -> Any:
        raise FailedPrecondition("a session cannot be copied or pickled: connect in each process")

    def _end_dense_step(self) -> None:
        if self._dense_rows is not None:
            self._dense_rows.end_step()

    def _rows_of(self, schema: TableSchema) -> TableRows:
        self._schemas[schema.name] = schema
        rate = None if self._optimizer is None else self._optimizer.learning_rates().get(schema.name)
        if rate is not None:
            schema = replace(schema, optimizer=replace(schema.optimizer, lr=rate))
        return TableRows(self.native, schema)

    def _send_learning_rates(self) -> None:
        if self._optimizer is None:
            return
        for name, rate in self._optimizer.learning_rates().items():
            if self._sent_rates[name] != rate:
                self.native.set_lr(f"{self.namespace}/{name}", rate)
                self._sent_rates[name] = rate
