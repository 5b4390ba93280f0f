"""``session.wrap``: a torch optimizer whose ``step()`` ends the session's step.

It serves training loops that call ``optimizer.step()`` themselves. It shares parameter groups, state and defaults with
the optimizer that it wraps, so schedulers, checkpoints and ``state_dict`` see the wrapped optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import GradScaler

from ...proto.errors import FailedPrecondition, InvalidArgument
from .dense_step import check_optimizer
from .loss_scale import LossScale, ScaleOfLoop

if TYPE_CHECKING:
    from torch.distributed.algorithms.join import Joinable

    from .session_core import SessionCore


class WrappedOptimizer(torch.optim.Optimizer):
    """The optimizer of the dense tower, wrapped so that its ``step()`` commits rows as well.

    :meth:`Session.wrap` makes it.

    Args:
        core: the session whose step it ends.
        joinable: the session, as torch's Join knows it.
        dense: the optimizer to wrap.
        scaler: the scaler whose ``step`` the loop calls; None: there is no scaler.
        clip_row_norm: the largest norm of a row's gradient; None: no limit.
    """

    # Makes a GradScaler call step() also when a gradient is not finite: then both sides drop their gradients.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        core: SessionCore,
        joinable: Joinable,
        dense: torch.optim.Optimizer,
        *,
        scaler: GradScaler | None,
        clip_row_norm: float | None,
    ) -> None:
        # torch's constructor would make groups and state of its own; __setstate__ sets up only the hooks.
        self._core, self._joinable, self._dense = core, joinable, dense
        self._scaler, self._clip_row_norm = scaler, clip_row_norm
        super().__setstate__({})

    @property
    def dense(self) -> torch.optim.Optimizer:
        """The wrapped optimizer, which updates the dense parameters."""
        return self._dense

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the dense optimizer; the list is shared with it."""
        return self._dense.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the dense optimizer, shared with it."""
        return self._dense.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The default options of the dense optimizer."""
        return self._dense.defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Ends the session's step, as :meth:`Session.step` does.

        Args:
            closure: called once before the step, with gradients enabled; None: nothing is called.

        Returns:
            The value that ``closure`` returned; None without a closure.

        Raises:
            InvalidArgument: the GradScaler that steps this optimizer is not the one that ``wrap`` was given.
            SparserowError: the step failed; :meth:`Session.step` lists the errors.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._core.step(self._joinable, self._dense, self._loss_scale(), clip_row_norm=self._clip_row_norm)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the dense gradients and the staged gradients of rows; rows that a forward has read stay.

        Args:
            set_to_none: whether dense gradients are set to None; False sets them to zeros.
        """
        self._dense.zero_grad(set_to_none)
        if self._core.native.staged_calls > 0:
            self._core.drop_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group to the dense optimizer."""
        self._dense.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the dense optimizer. The optimizer state of rows is on the servers."""
        return self._dense.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state into the dense optimizer."""
        self._dense.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"session.wrap({self._dense!r})"

    def __reduce__(self) -> Any:
        raise FailedPrecondition(
            "session.wrap: a wrapped optimizer cannot be copied or pickled; wrap it in each process"
        )

    def _loss_scale(self) -> LossScale | None:
        is_scaled = hasattr(self, "found_inf")  # a GradScaler sets it around its call of step()
        scaler = self._scaler
        if not is_scaled:
            if scaler is not None and scaler.is_enabled():
                raise InvalidArgument(
                    "session.wrap: the optimizer was wrapped with a scaler, but step() was called directly; call "
                    "scaler.step(optimizer)"
                )
            return None
        if scaler is None:
            raise InvalidArgument(
                "session.wrap: a GradScaler steps this optimizer; pass it, session.wrap(dense, scaler=scaler), so that "
                "the rows' gradients are unscaled too"
            )
        return ScaleOfLoop(scaler, self, self.__dict__["grad_scale"])


def checked_dense(core: SessionCore, dense: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns ``dense`` if a session can wrap it.

    Raises:
        InvalidArgument: ``dense`` is not an optimizer, is wrapped already, or calls its closure several times a step.
    """
    check_optimizer(dense, "session.wrap")
    if isinstance(dense, WrappedOptimizer) or core.is_optimizer(dense):
        raise InvalidArgument(
            "session.wrap: dense is wrapped already, or is session.optimizer; allowed: the optimizer of the dense side"
        )
    return dense


def unwrapped(
    core: SessionCore, dense: torch.optim.Optimizer | None, scaler: GradScaler | None
) -> torch.optim.Optimizer | None:
    """Returns the optimizer that ``session.step`` steps: ``dense`` itself, or the optimizer that ``dense`` wraps.

    Raises:
        InvalidArgument: ``dense`` is not an optimizer, needs a closure, or is ``session.optimizer``. Or another session
            wrapped ``dense``, or a scaler is given besides a wrapped optimizer.
    """
    if dense is None:
        return None
    if not isinstance(dense, WrappedOptimizer):
        check_optimizer(dense, "session.step")
        if core.is_optimizer(dense):
            raise InvalidArgument(
                "session.step: dense is session.optimizer, which the session steps itself; allowed: the optimizer of "
                "the dense side, or None"
            )
        return dense
    if dense._core is not core:
        raise InvalidArgument("session.step: dense is wrapped by another session")
    if scaler is not None:
        raise InvalidArgument(
            "session.step: dense is wrapped, so scaler must be None; call scaler.step(optimizer) and scaler.update()"
        )
    return dense.dense
