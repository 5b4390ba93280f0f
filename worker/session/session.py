"""A worker's session: its tables, its clock, and the end of each step."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.join import Joinable, JoinHook

from ...proto.closing import Closing
from ...proto.errors import FailedPrecondition
from ...proto.schema import Constant, Dtype, Init, RowPolicy, TableSchema
from .join import SessionJoinHook, checked_micro_batches, collective_device, default_group
from .loss_scale import LossScale
from .row_optimizers import OptimizerLike, row_optimizer_of
from .session_core import SessionCore
from .session_stats import SessionStats
from .sparse_optimizer import SparseOptimizer
from .table import TableRows
from .wrapped_optimizer import WrappedOptimizer, checked_dense, unwrapped


class Session(Closing, Joinable):
    """Made by :func:`connect`. Explicit, and closed by ``close()`` or a ``with`` statement.

    ``step`` belongs to the thread that trains; lookups may come from any thread. After ``fork`` the child's copy raises
    :class:`FailedPrecondition` on use, and closing it leaves the parent's alone. For workers with unequal numbers of
    batches it goes into torch's ``Join`` (worker/session/join.py).

    Attributes:
        core: what the library's own modules use; it may change with any version.
    """

    def __init__(self, core: SessionCore) -> None:
        super().__init__()
        self.core = core

    @property
    def namespace(self) -> str:
        """The namespace of every table that this session names."""
        return self.core.namespace

    @property
    def rank(self) -> int:
        """This worker's place in the order of reduction."""
        return self.core.placement.rank

    @property
    def world_size(self) -> int:
        """Workers of the job when it began."""
        return self.core.placement.world_size

    @property
    def current_step(self) -> int:
        """The step that the next commit ends."""
        return self.core.native.step

    @property
    def optimizer(self) -> SparseOptimizer:
        """Learning rates by table, for ``torch.optim.lr_scheduler``.

        Raises:
            FailedPrecondition: before ``distribute``, as there is no table yet.
        """
        return self.core.optimizer

    def create_table(
        self,
        name: str,
        *,
        dim: int,
        optimizer: OptimizerLike,
        dtype: Dtype = "float32",
        init: Init | None = None,
        seed: int = 0,
        policy: RowPolicy | None = None,
    ) -> TableRows:
        """Creates a table for use by key, or finds it.

        Args:
            name: within the session's namespace.
            dim: columns.
            optimizer: runs on the shards; its ``lr`` is the default of ``push``. As that of :func:`distribute`.
            dtype: of stored weights.
            init: initial rows of keys without a push; None is zeros.
            seed: of initial rows.
            policy: which keys get a row and which rows go again; None: every key, and none.

        Raises:
            FailedPrecondition: it exists with another schema (names the field).
            InvalidArgument: an argument is out of its range, or the optimizer has no counterpart on the servers.
        """
        self.core.native.check_usable()
        schema = TableSchema(
            namespace=self.namespace,
            name=name,
            dim=dim,
            optimizer=row_optimizer_of(optimizer, "create_table.optimizer"),
            dtype=dtype,
            init=Constant() if init is None else init,
            seed=seed,
            policy=RowPolicy() if policy is None else policy,
        )
        return self.core.create_table(schema)

    def table(self, name: str) -> TableRows:
        """Rows of a table by key.

        Raises:
            NotFound: the namespace has no such table (lists those it has).
        """
        return self.core.table(name)

    def drop_table(self, name: str) -> None:
        """Removes a table of the namespace and all of its rows, for every worker and for ever.

        Raises:
            NotFound: the namespace has no such table.
            FailedPrecondition: a model of this process uses it.
        """
        self.core.drop_table(name)

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
        return self.core.step(
            self, unwrapped(self, dense, scaler), scale, allow_empty=allow_empty, clip_row_norm=clip_row_norm
        )

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

    def flush(self) -> None:
        """Waits until the shards have applied every step taken; at staleness 0 they have when ``step`` returns.

        Raises:
            DeadlineExceeded, Unavailable: the outcome of the last step is unknown; the session can only be closed.
        """
        self.core.flush()

    def discard(self) -> None:
        """Ends the step without a commit: rows and staged gradients are forgotten, the clock stays."""
        self.core.discard()

    def stats(self) -> SessionStats:
        """Counters since the session was made."""
        return self.core.stats()

    def close(self) -> None:
        """Ends what prefetches, leaves the job and forgets the tables. Idempotent.

        Gradients of a step in progress are dropped with a warning. In a forked child the copy forgets its tables; the
        parent stays in the job. A session that is open when its process ends is closed then (close_at_exit.py).

        Raises:
            FailedPrecondition: an optimizer stepped in place of ``session.step``, so rows were not trained.
            DeadlineExceeded, Unavailable: the outcome of the last step is unknown.
                The session is closed all the same.
        """
        self.core.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes it; an error that ends the ``with`` block is told to the coordinator, for ``sparserow status``."""
        self.core.report_fault(error)
        if error is None:
            self.close()
        else:
            self.core.end()  # the error that ends the block counts

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What torch's ``Join`` calls.

        Args:
            kwargs: of ``Join``. ``micro_batches``: forwards of each step (default 1), where the others accumulate.

        Raises:
            InvalidArgument: ``divide_by_initial_world_size=False``, or ``micro_batches`` below 1.
        """
        return SessionJoinHook(self.core.end_empty_step, checked_micro_batches(kwargs))

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

    def __reduce__(self) -> Any:
        raise FailedPrecondition("a session cannot be copied or pickled: connect in each process")
