"""``session.wrap``: a torch optimizer whose step is the session's, for loops that call ``optimizer.step()`` themselves.

It shares parameter groups, state and defaults with the optimizer that it wraps, so schedulers, checkpoints and
``state_dict`` see that one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import GradScaler

from ...proto.errors import FailedPrecondition, InvalidArgument
from .loss_scale import LossScale, ScaleOfLoop

if TYPE_CHECKING:
    from .session import Session


class WrappedOptimizer(torch.optim.Optimizer):
    """Made by :meth:`Session.wrap`."""

    # Has a GradScaler call step() also when a gradient is not finite, so that the rows are dropped with the dense side.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        session: Session,
        dense: torch.optim.Optimizer,
        *,
        scaler: GradScaler | None,
        clip_row_norm: float | None,
    ) -> None:
        # torch's constructor would make groups and state of its own; this sets up its hooks alone.
        self._session, self._dense, self._scaler, self._clip_row_norm = session, dense, scaler, clip_row_norm
        super().__setstate__({})

    @property
    def dense(self) -> torch.optim.Optimizer:
        """The optimizer of the dense side."""
        return self._dense

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the dense optimizer."""
        return self._dense.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the dense optimizer."""
        return self._dense.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the dense optimizer."""
        return self._dense.defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Ends the session's step, as :meth:`Session.step` does.

        Args:
            closure: is called once before, with gradients enabled.

        Returns:
            What ``closure`` returned; None without one.

        Raises:
            InvalidArgument: a GradScaler steps it that ``wrap`` was not given.
            SparserowError: as :meth:`Session.step`.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._session.core.step(self._session, self._dense, self._loss_scale(), clip_row_norm=self._clip_row_norm)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of both sides; rows that a forward has read stay for its backward."""
        self._dense.zero_grad(set_to_none)
        if self._session.core.native.staged_calls > 0:
            self._session.core.on_device.drop_gradients()
            self._session.core.native.drop_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """To the dense optimizer."""
        self._dense.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """That of the dense optimizer; the rows' state is on the servers."""
        return self._dense.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the dense optimizer."""
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
                raise InvalidArgument("session.wrap: step it by the scaler that it was given: scaler.step(optimizer)")
            return None
        if scaler is None:
            raise InvalidArgument(
                "session.wrap: a GradScaler steps this optimizer; pass it, session.wrap(dense, scaler=scaler), so that "
                "the rows' gradients are unscaled too"
            )
        return ScaleOfLoop(scaler, self, self.__dict__["grad_scale"])


def checked_dense(session: Session, dense: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer to wrap.

    Raises:
        InvalidArgument: it is no optimizer, is wrapped already, or calls its closure several times a step.
    """
    if not isinstance(dense, torch.optim.Optimizer):
        raise InvalidArgument(
            f"session.wrap: dense of type {type(dense).__name__} is not allowed; allowed: torch.optim.Optimizer"
        )
    if isinstance(dense, WrappedOptimizer) or session.core.is_optimizer(dense):
        raise InvalidArgument("session.wrap: dense is the session's already; allowed: the dense side's optimizer")
    closure = inspect.signature(type(dense).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InvalidArgument(
            f"session.wrap: {type(dense).__name__} calls its closure several times a step, and rows move once a step; "
            "allowed: optimizers whose step() needs no closure"
        )
    return dense


def unwrapped(
    session: Session, dense: torch.optim.Optimizer | None, scaler: GradScaler | None
) -> torch.optim.Optimizer | None:
    """What ``session.step`` is to step: of a wrapped optimizer the one that it wraps.

    Raises:
        InvalidArgument: it is wrapped by another session, or comes with a scaler that knows the wrapped one.
    """
    if not isinstance(dense, WrappedOptimizer):
        return dense
    if dense._session is not session:
        raise InvalidArgument("session.step: dense is wrapped by another session")
    if scaler is not None:
        raise InvalidArgument("session.step: dense is wrapped; call scaler.step(optimizer) and scaler.update()")
    return dense.dense
