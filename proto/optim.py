"""The optimizers that the servers run, row by row, with the options of ``cpp_ext/schema/optimizer_spec.h``
(docs/optimizers.md).

The learning rate is not part of a table's schema. It travels with each commit, so that schedulers work. ``lr`` is where
it starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Real
from types import MappingProxyType
from typing import ClassVar, TypeAlias, get_args

from .errors import InvalidArgument, not_allowed

MAX_FLOAT32 = 3.4028234663852886e38


@dataclass(frozen=True)
class _Range:
    text: str
    allows: Callable[[float], bool]


_FRACTION = _Range("[0, 1)", lambda value: 0 <= value < 1)
_FRACTIONS = _Range("a pair of numbers in [0, 1)", lambda value: 0 <= value < 1)  # of each of the two
_POSITIVE = _Range("> 0", lambda value: value > 0)
_NOT_NEGATIVE = _Range(">= 0", lambda value: value >= 0)
_FLAG = _Range("True, False", math.isfinite)
_RANGES = MappingProxyType({
    "lr": _Range("a finite number >= 0", lambda value: value >= 0),
    "momentum": _FRACTION,
    "dampening": _Range("[0, 1]", lambda value: 0 <= value <= 1),
    "nesterov": _FLAG,
    "weight_decay": _NOT_NEGATIVE,
    "decoupled": _FLAG,
    "eps": _POSITIVE,
    "initial_accumulator": _NOT_NEGATIVE,
    "accumulator_decay": _Range("(0, 1]", lambda value: 0 < value <= 1),
    "betas": _FRACTIONS,
    "amsgrad": _FLAG,
    "alpha": _FRACTION,
    "centered": _FLAG,
    "rho": _FRACTION,
    "beta": _POSITIVE,
    "l1": _NOT_NEGATIVE,
    "l2": _NOT_NEGATIVE,
    "group_lasso": _NOT_NEGATIVE,
})  # fmt: skip


def _is_number(value: object, *, is_flag: bool) -> bool:
    if is_flag or isinstance(value, bool):
        return is_flag and isinstance(value, bool)
    return isinstance(value, Real) and abs(float(value)) <= MAX_FLOAT32  # neither NaN nor infinity


class _Options:
    """The common part of the optimizers: the check of their options, and the layout of their state."""

    kind: ClassVar[str]  # the name in job files and in the native enum
    _STATE: ClassVar[tuple[str, ...]] = ()  # the arrays of state, with a float32 per column each
    _STATE_OPTIONS: ClassVar[tuple[str, ...]] = ()  # the options that add an array

    def __post_init__(self) -> None:
        for option in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value, allowed = getattr(self, option.name), _RANGES[option.name]
            numbers = [value]
            if allowed is _FRACTIONS:
                numbers = list(value) if isinstance(value, tuple | list) and len(value) == 2 else [None]
            if not all(_is_number(each, is_flag=allowed is _FLAG) and allowed.allows(each) for each in numbers):
                raise not_allowed(f"{type(self).__name__}.{option.name}", value, allowed.text)
            if allowed is _FRACTIONS:
                object.__setattr__(self, option.name, (float(value[0]), float(value[1])))

    @property
    def state_layout(self) -> str:
        """The name of the optimizer with the options that its state depends on, such as ``SGD with momentum``."""
        used = [option for option in self._STATE_OPTIONS if getattr(self, option)]
        return type(self).__name__ + (f" with {' and '.join(used)}" if used else "")

    def state_floats(self, dim: int) -> int:
        """Returns the number of float32 values of state that a row of ``dim`` columns has."""
        return dim * (len(self._STATE) + sum(bool(getattr(self, option)) for option in self._STATE_OPTIONS))


@dataclass(frozen=True)
class SGD(_Options):
    """SGD with optional momentum, as ``torch.optim.SGD`` on each row.

    Args:
        lr: the initial learning rate.
        momentum: the share of the momentum that a step keeps; 0 keeps no momentum.
        dampening: the share of the gradient that does not enter the momentum.
        nesterov: whether a step looks ahead by the momentum; it needs ``momentum`` > 0 and ``dampening`` 0.
        weight_decay: the factor of weight decay; 0 means none.
        decoupled: whether the decay multiplies the weights by ``1 - lr * weight_decay``, instead of being a part of the
            gradient.

    Raises:
        InvalidArgument: an option is out of its range.
    """

    kind: ClassVar[str] = "sgd"
    _STATE_OPTIONS: ClassVar[tuple[str, ...]] = ("momentum",)
    lr: float = 0.01
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    decoupled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise InvalidArgument("SGD.nesterov: needs momentum > 0 and dampening = 0")


@dataclass(frozen=True)
class Adagrad(_Options):
    """Adagrad (Duchi et al. 2011), as ``torch.optim.Adagrad`` on each row.

    Args:
        lr: the initial learning rate.
        eps: the number that is added to the root of the accumulator.
        initial_accumulator: the accumulator of a row before its first update.
        weight_decay: the factor of weight decay; 0 means none.
        decoupled: as for :class:`SGD`.
        accumulator_decay: the factor of the accumulator before each sum, whatever the learning rate is; 1 forgets
            nothing.

    Raises:
        InvalidArgument: an option is out of its range.
    """

    kind: ClassVar[str] = "adagrad"
    _STATE: ClassVar[tuple[str, ...]] = ("accumulator",)
    lr: float = 0.01
    eps: float = 1e-10
    initial_accumulator: float = 0.0
    weight_decay: float = 0.0
    decoupled: bool = False
    accumulator_decay: float = 1.0


@dataclass(frozen=True)
class RowWiseAdagrad(_Options):
    """Adagrad with one accumulator per row: the sum of the mean squared gradient over the columns (Mudigere et al.
    2022).

    Args:
        lr: the initial learning rate.
        eps: the number that is added to the root of the accumulator.
        initial_accumulator: the accumulator of a row before its first update.
        weight_decay: the factor of weight decay; 0 means none.
        decoupled: as for :class:`SGD`.
        accumulator_decay: as for :class:`Adagrad`.

    Raises:
        InvalidArgument: an option is out of its range.
    """

    kind: ClassVar[str] = "rowwise_adagrad"
    lr: float = 0.01
    eps: float = 1e-10
    initial_accumulator: float = 0.0
    weight_decay: float = 0.0
    decoupled: bool = False
    accumulator_decay: float = 1.0

    def state_floats(self, dim: int) -> int:
        """Returns 1, the accumulator of a row of any ``dim``."""
        del dim
        return 1


@dataclass(frozen=True)
class Adam(_Options):
    """Adam (Kingma & Ba 2015), as ``torch.optim.Adam`` on each row; bias correction counts the updates of the row.

    Args:
        lr: the initial learning rate.
        betas: the shares of the first and of the second moment that a step keeps.
        eps: the number that is added to the root of the second moment.
        weight_decay: the factor of weight decay; 0 means none.
        decoupled: as for :class:`SGD`. With True the optimizer is AdamW (Loshchilov & Hutter 2019).
        amsgrad: whether the largest second moment so far takes the place of the present one (Reddi et al. 2018).

    Raises:
        InvalidArgument: an option is out of its range.
    """

    kind: ClassVar[str] = "adam"
    _STATE: ClassVar[tuple[str, ...]] = ("first moment", "second moment")
    _STATE_OPTIONS: ClassVar[tuple[str, ...]] = ("amsgrad",)
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    amsgrad: bool = False


def AdamW(  # noqa: N802 - it stands where a class stands, as torch.optim.AdamW does
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    amsgrad: bool = False,
) -> Adam:
    """Returns :class:`Adam` with ``decoupled=True`` and the default decay of ``torch.optim.AdamW``.

    Args:
        lr: as for :class:`Adam`.
        betas: as for :class:`Adam`.
        eps: as for :class:`Adam`.
        weight_decay: as for :class:`Adam`.
        amsgrad: as for :class:`Adam`.

    Raises:
        InvalidArgument: an option is out of its range.
    """
    return Adam(lr, betas, eps, weight_decay, decoupled=True, amsgrad=amsgrad)


@dataclass(frozen=True)
class RMSprop(_Options):
    """RMSprop (Tieleman & Hinton 2012), as ``torch.optim.RMSprop`` on each row.

    Args:
        lr: the initial learning rate.
        alpha: the share of the mean square that a step keeps.
        eps: the number that is added to the root of the mean square.
        momentum: the share of the momentum that a step keeps; 0 keeps no momentum.
        centered: whether the mean of the gradients is taken off the mean square (Graves 2013).
        weight_decay: the factor of weight decay; 0 means none.
        decoupled: as for :class:`SGD`.

    Raises:
        InvalidArgument: an option is out of its range.
    """

    kind: ClassVar[str] = "rmsprop"
    _STATE: ClassVar[tuple[str, ...]] = ("mean square",)
    _STATE_OPTIONS: ClassVar[tuple[str, ...]] = ("centered", "momentum")
    lr: float = 0.01
    alpha: float = 0.99
    eps: float = 1e-8
    momentum: float = 0.0
    centered: bool = False
    weight_decay: float = 0.0
    decoupled: bool = False


@dataclass(frozen=True)
class Adadelta(_Options):
    """Adadelta (Zeiler 2012), as ``torch.optim.Adadelta`` on each row.

    Args:
        lr: the factor of each step.
        rho: the share of both mean squares that a step keeps.
        eps: the number that is added to both mean squares.
        weight_decay: the factor of weight decay; 0 means none.
        decoupled: as for :class:`SGD`.

    Raises:
        InvalidArgument: an option is out of its range.
    """

    kind: ClassVar[str] = "adadelta"
    _STATE: ClassVar[tuple[str, ...]] = ("mean square", "mean squared step")
    lr: float = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    weight_decay: float = 0.0
    decoupled: bool = False


@dataclass(frozen=True)
class Lion(_Options):
    """Lion (Chen et al. 2023) on each row: each weight moves by ``lr`` along the sign of a mean of gradients.

    Args:
        lr: the initial learning rate.
        betas: the share of the momentum in the mean whose sign is taken, and the share that a step keeps.
        weight_decay: the factor of weight decay; 0 means none.
        decoupled: as for :class:`SGD`; True is the form of the paper.

    Raises:
        InvalidArgument: an option is out of its range.
    """

    kind: ClassVar[str] = "lion"
    _STATE: ClassVar[tuple[str, ...]] = ("momentum",)
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    decoupled: bool = True


@dataclass(frozen=True)
class LAMB(_Options):
    """LAMB (You et al. 2020) with one trust ratio per row; bias correction counts the updates of the row.

    Args:
        lr: the initial learning rate.
        betas: the shares of the first and of the second moment that a step keeps.
        eps: the number that is added to the root of the second moment.
        weight_decay: the factor of weight decay; 0 means none.
        decoupled: whether ``weight_decay`` times the weights is a part of the update that the trust ratio scales, as in
            the paper, or else of the gradient.

    Raises:
        InvalidArgument: an option is out of its range.
    """

    kind: ClassVar[str] = "lamb"
    _STATE: ClassVar[tuple[str, ...]] = ("first moment", "second moment")
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.0
    decoupled: bool = True


@dataclass(frozen=True)
class FTRL(_Options):
    """FTRL-proximal (McMahan et al. 2013) on each row, with L1, L2 and group lasso.

    With ``l1`` or ``group_lasso`` the initial rows of a table are zeros, unless they are given.

    Args:
        lr: the initial learning rate, alpha in the paper.
        beta: the number that is added to the root of the sum of squared gradients.
        l1: the factor of the weights' L1 norm, which makes weights exactly 0.
        l2: the factor of half the weights' squared L2 norm.
        group_lasso: the factor of ``sqrt(dim)`` times a row's L2 norm, which makes whole rows exactly 0.
        weight_decay: the factor of weight decay; 0 means none.
        decoupled: as for :class:`SGD`.

    Raises:
        InvalidArgument: an option is out of its range.
    """

    kind: ClassVar[str] = "ftrl"
    _STATE: ClassVar[tuple[str, ...]] = ("accumulator", "residual")
    lr: float = 0.05
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    group_lasso: float = 0.0
    weight_decay: float = 0.0
    decoupled: bool = False


RowOptimizer: TypeAlias = SGD | Adagrad | RowWiseAdagrad | Adam | RMSprop | Adadelta | Lion | LAMB | FTRL
# By kind, in the order of the native enum.
OPTIMIZERS: MappingProxyType[str, type[RowOptimizer]] = MappingProxyType({
    each.kind: each for each in get_args(RowOptimizer)
})  # fmt: skip


def starts_at_zero(optimizer: RowOptimizer) -> bool:
    """Whether initial rows are zeros unless they are given: where the optimizer makes weights exactly 0."""
    return isinstance(optimizer, FTRL) and (optimizer.l1 > 0 or optimizer.group_lasso > 0)
