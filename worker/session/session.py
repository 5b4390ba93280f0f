"""A worker's session: its tables, its clock, and the end of each step."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.distributed.algorithms.join import Joinable, JoinHook

from ...proto.closing import Closing
from ...proto.errors import FailedPrecondition
from .join import SessionJoinHook, checked_micro_batches, collective_device, default_group
from .loss_scale import LossScale
from .session_core import SessionCore
from .session_stats import SessionStats
from .sparse_optimizer import SparseOptimizer
from .wrapped_optimizer import WrappedOptimizer, checked_dense, unwrapped


class JobSession(Closing, Joinable):
    """One worker's connection to a job: its tables, its clock, and the end of each step.

    A session is closed by ``close()`` or a ``with`` statement. Only the thread that trains calls ``step``; any thread
    may look up rows. After ``fork`` the child's copy raises :class:`FailedPrecondition` on use, and closing the copy
    does not affect the parent's session. Workers with unequal numbers of batches put the session into torch's ``Join``
    (worker/session/join.py).

    Attributes:
        core: the part that the library's own modules use; it may change with any version.
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
        """This worker's rank, which is also its place in the order of reduction."""
        return self.core.placement.rank

    @property
    def world_size(self) -> int:
        """The number of workers that the job began with."""
        return self.core.placement.world_size

    @property
    def current_step(self) -> int:
        """The number of the step that the next commit ends."""
        return self.core.native.step

    def __repr__(self) -> str:
        place = self.core.placement
        return f"{type(self).__name__}(namespace={self.namespace!r}, rank={place.rank}, world_size={place.world_size})"

    @property
    def optimizer(self) -> SparseOptimizer:
        """The optimizer that holds the learning rate of each table, for ``torch.optim.lr_scheduler``.

        Raises:
            FailedPrecondition: ``distribute`` was not called, so there is no table yet.
        """
        return self.core.optimizer

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

        The gradients that backward has staged since the last step, over all micro-batches, are unscaled, checked and
        committed. Then ``dense`` steps. A scaler, when given, makes that step and is updated. Afterwards the gradients
        of both sides are gone, whatever the outcome: this method calls ``dense.zero_grad()``.

        Args:
            dense: the optimizer of the local parameters; None after :func:`dense_on_servers`, or where only rows are
                trained. A warning is issued when parameters with gradients do not move.
            scaler: the ``torch.amp.GradScaler`` that scaled the loss; None: the loss is not scaled. A step that the
                scaler skips raises nothing, as in torch.
            allow_empty: whether to commit although no backward reached a distributed table.
            clip_row_norm: the largest L2 norm of a row's gradient; longer gradients are shortened to it. It applies to
                the unscaled sum over this worker's step, before the average over workers. None: no limit. Clip dense
                gradients with torch's ``clip_grad_norm_`` before this call.

        Returns:
            Whether the step was taken; False when the scaler or ``on_nonfinite="skip"`` skipped it, or when the step
            has its quorum without this worker (``connect(quorum=...)``). Then ``current_step`` is the next step that
            takes members.

        Raises:
            NonFiniteGradient: a sparse or dense gradient, of this rank or another, has NaN or Inf. The model and the
                tables are unchanged, and the session can go on. With a scaler or ``on_nonfinite="skip"`` it is not
                raised.
            FailedPrecondition: no backward reached a table, and ``allow_empty`` is False. Or ``dense.step()`` raised
                after the rows were committed; its error is the cause, and the dense weights were not updated.
            InvalidArgument: ``dense`` is no optimizer, is ``session.optimizer``, needs a closure as LBFGS does, or is a
                ``SparseAdam`` with a dense gradient. Or ``clip_row_norm`` is not above 0. Or ``dense`` or
                ``clip_row_norm`` is given although the dense tensors are on the servers. Or, within ``Join``, the
                session stands before the DDP model or ``dense`` is a ``ZeroRedundancyOptimizer``.
            ResourceExhausted, Unavailable, ...: a shard refused the step; nothing was applied anywhere.
            Fenced: this worker has lost its place in the job; the text says when the step may have been applied.
            DeadlineExceeded: the outcome is unknown, and the session can only be closed. Unless ``staleness`` is 0,
                the last phase of a commit is sent in the background; the next ``step``, ``flush`` or ``close``
                raises its error.
        """
        scale = LossScale(scaler) if scaler is not None and scaler.is_enabled() else None
        return self.core.step(
            self, unwrapped(self.core, dense, scaler), scale, allow_empty=allow_empty, clip_row_norm=clip_row_norm
        )

    def wrap(
        self, dense: torch.optim.Optimizer, *, scaler: GradScaler | None = None, clip_row_norm: float | None = None
    ) -> WrappedOptimizer:
        """Returns an optimizer whose ``step()`` ends this session's step, for training loops of other libraries.

        Examples of such loops are ``fit()`` methods and Lightning. The parameter groups and the ``state_dict`` are
        those of ``dense``; the learning rates of the tables stay in ``session.optimizer``. ``zero_grad()`` drops the
        gradients of the rows too.

        Args:
            dense: the optimizer of the model's local parameters.
            scaler: the ``torch.amp.GradScaler`` whose ``step`` and ``update`` the loop calls; None: there is no scaler.
            clip_row_norm: the limit of a row's gradient norm; see :meth:`step`.

        Raises:
            InvalidArgument: ``dense`` is no optimizer, is wrapped already, or needs a closure, as LBFGS does.
        """
        return WrappedOptimizer(
            self.core, self, checked_dense(self.core, dense), scaler=scaler, clip_row_norm=clip_row_norm
        )

    def flush(self) -> None:
        """Waits until the shards have applied every step taken. At staleness 0 this is so when ``step`` returns.

        Raises:
            DeadlineExceeded, Unavailable: the outcome of the last step is unknown; the session can only be closed.
        """
        self.core.flush()

    def discard(self) -> None:
        """Ends the step without a commit: the step's rows and staged gradients are dropped, the clock stays."""
        self.core.discard()

    def stats(self) -> SessionStats:
        """Returns the counters since the session was made."""
        return self.core.stats()

    def close(self) -> None:
        """Ends running prefetches, leaves the job and unbinds the tables. Further calls do nothing.

        Gradients of a step in progress are dropped with a warning. A forked child unbinds its copy's tables, and the
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
        """Closes the session. An error that ends the ``with`` block is reported for ``sparserow status``."""
        self.core.report_fault(error)
        if error is None:
            self.close()
        else:
            self.core.end()  # raises nothing about unsent gradients: the block's own error is the one to see

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Returns the hook that torch's ``Join`` calls on a worker whose data has ended.

        Args:
            kwargs: the keyword arguments of ``Join``. ``micro_batches`` is the number of forwards in each step of the
                other workers, for loops that accumulate gradients; 1 by default.

        Raises:
            InvalidArgument: ``divide_by_initial_world_size=False``, or ``micro_batches`` below 1.
            FailedPrecondition: the session is in a tensor group, whose towers call their ranks in every forward; or it
                has tables on devices, whose lookups call all ranks.
        """
        if self.core.has_device_tables:
            raise FailedPrecondition(
                "Join: a session with tables of placement 'device' cannot join, as a lookup of such a table calls all "
                "ranks; give every rank the same number of batches"
            )
        if self.core.tensor_group is not None:
            raise FailedPrecondition(
                "Join: a session in a tensor group cannot join, as the forward of a tower in parts calls all of its "
                "ranks; give every group the same number of batches"
            )
        return SessionJoinHook(self.core.end_empty_step, checked_micro_batches(kwargs))

    @property
    def join_device(self) -> torch.device:
        """The device of the tensors that the session's collective calls use."""
        return collective_device()

    @property
    def join_process_group(self) -> Any:
        """The process group of the session's collective calls, which is the default group.

        Raises:
            FailedPrecondition: torch.distributed is not initialised.
        """
        return default_group()

    def __reduce__(self) -> Any:
        raise FailedPrecondition("a session cannot be copied or pickled: connect in each process")
