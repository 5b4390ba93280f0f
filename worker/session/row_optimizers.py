"""Converts optimizers of ``torch.optim`` into the row optimizers that the servers run."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import nn

from ...proto.errors import FailedPrecondition, InvalidArgument, not_allowed
from ...proto.optim import OPTIMIZERS, SGD, Adadelta, Adagrad, Adam, AdamW, RMSprop, RowOptimizer

OptimizerLike: TypeAlias = RowOptimizer | torch.optim.Optimizer | type | functools.partial[Any]

_OURS = tuple(OPTIMIZERS.values())
# Options of torch's optimizers that choose an implementation and do not change the result.
_HOW = ("foreach", "fused", "capturable", "differentiable")


def row_optimizer_of(given: Any, where: str) -> RowOptimizer:
    """Returns the row optimizer that the servers run for the optimizer that a user gives.

    Args:
        given: a row optimizer of this package, or its class, which is then made with its defaults. Or an optimizer of
            ``torch.optim`` that has a counterpart, as a class, as a ``functools.partial`` of the class, or as an
            instance that has not stepped. The options of a partial or an instance are taken over.
        where: the argument's name in error texts.

    Raises:
        InvalidArgument: the optimizer or one of its options has no counterpart on the servers; the text names both.
        FailedPrecondition: the instance has stepped, and its state would be lost.
    """
    if isinstance(given, _OURS):
        return given
    if given is AdamW or (isinstance(given, type) and issubclass(given, _OURS)):
        made_here: RowOptimizer = given()
        return made_here
    made = _made(given, where)
    if type(made) not in _COUNTERPARTS:
        raise InvalidArgument(f"{where}: {_name(given)} has no counterpart on the servers; allowed: {_allowed()}")
    if len({repr(_options(group)) for group in made.param_groups}) != 1:
        raise InvalidArgument(
            f"{where}: {_name(given)} has {len(made.param_groups)} groups with different options, but a table has one "
            "optimizer; give each table its own with tables={pattern: sr.Table(optimizer=...)}"
        )
    if any(float(state.get("step", 1)) > 0 for state in made.state.values()):
        raise FailedPrecondition(f"{where}: {_name(given)} has stepped, and its state would be lost; give a new one")
    options = _options(made.param_groups[0])
    try:
        return _COUNTERPARTS[type(made)](options)
    except _Unsupported as error:
        raise InvalidArgument(
            f"{where}: {_name(given)} with {error} has no counterpart on the servers; allowed: {_allowed()}"
        ) from None


class _Unsupported(Exception):  # noqa: N818 - it never leaves this module
    """Raised for an option that the matching row optimizer does not have."""


def _made(given: Any, where: str) -> torch.optim.Optimizer:
    if isinstance(given, torch.optim.Optimizer):
        return given
    kind = given.func if isinstance(given, functools.partial) else given
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise not_allowed(where, given, _allowed())
    if kind not in _COUNTERPARTS:
        raise InvalidArgument(f"{where}: {_name(given)} has no counterpart on the servers; allowed: {_allowed()}")
    try:
        made: torch.optim.Optimizer = given([nn.Parameter(torch.zeros(1))])
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{where}: {_name(given)}: {error}") from None
    return made


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params" and name not in _HOW}


def _take(options: dict[str, Any], *names: str) -> list[float]:
    """Removes the named options and returns their values as floats; raises unless all other options are off."""
    taken = [float(options.pop(name)) for name in names]
    for name, value in options.items():
        if name != "initial_lr" and value not in (0, False, None):
            raise _Unsupported(f"{name}={value!r}")
    return taken


def _sgd(options: dict[str, Any]) -> RowOptimizer:
    is_nesterov = bool(options.pop("nesterov"))
    lr, momentum, dampening, decay = _take(options, "lr", "momentum", "dampening", "weight_decay")
    return SGD(lr, momentum=momentum, dampening=dampening, nesterov=is_nesterov, weight_decay=decay)


def _adagrad(options: dict[str, Any]) -> RowOptimizer:
    lr, eps, initial, decay = _take(options, "lr", "eps", "initial_accumulator_value", "weight_decay")
    return Adagrad(lr, eps=eps, initial_accumulator=initial, weight_decay=decay)


def _adam(options: dict[str, Any]) -> RowOptimizer:
    betas = options.pop("betas")
    flags = {"amsgrad": bool(options.pop("amsgrad")), "decoupled": bool(options.pop("decoupled_weight_decay"))}
    lr, eps, decay = _take(options, "lr", "eps", "weight_decay")
    return Adam(lr, (float(betas[0]), float(betas[1])), eps, decay, **flags)


def _rmsprop(options: dict[str, Any]) -> RowOptimizer:
    is_centered = bool(options.pop("centered"))
    lr, alpha, eps, momentum, decay = _take(options, "lr", "alpha", "eps", "momentum", "weight_decay")
    return RMSprop(lr, alpha=alpha, eps=eps, momentum=momentum, centered=is_centered, weight_decay=decay)


def _adadelta(options: dict[str, Any]) -> RowOptimizer:
    lr, rho, eps, decay = _take(options, "lr", "rho", "eps", "weight_decay")
    return Adadelta(lr, rho=rho, eps=eps, weight_decay=decay)


_COUNTERPARTS = {
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adadelta: _adadelta,
}


def _name(given: Any) -> str:
    kind = given.func if isinstance(given, functools.partial) else given
    kind = kind if isinstance(kind, type) else type(kind)
    return f"{kind.__module__.removesuffix('.' + kind.__name__.lower())}.{kind.__name__}"


def _allowed() -> str:
    ours = ", ".join(f"sr.optim.{kind.__name__}" for kind in (*_OURS, AdamW))
    return f"{ours}, " + ", ".join(f"torch.optim.{kind.__name__}" for kind in _COUNTERPARTS)
