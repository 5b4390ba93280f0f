"""A table's schema in the terms of the native store (``cpp_ext/schema/schema.h``), for both of its bindings."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias

from .schema import (
    EVICT_BY,
    SGD,
    Adagrad,
    Adam,
    Constant,
    Init,
    Normal,
    RowOptimizer,
    RowPolicy,
    RowWiseAdagrad,
    Uniform,
    XavierNormal,
    XavierUniform,
)

InitKind: TypeAlias = Literal["constant", "uniform", "normal", "xavier_uniform", "xavier_normal"]
OptimizerKind: TypeAlias = Literal["sgd", "adagrad", "rowwise_adagrad", "adam"]

# In the order of the native enums.
INIT_KINDS: tuple[InitKind, ...] = ("constant", "uniform", "normal", "xavier_uniform", "xavier_normal")
OPTIMIZER_KINDS: tuple[OptimizerKind, ...] = ("sgd", "adagrad", "rowwise_adagrad", "adam")
_OPTIMIZERS: tuple[type[RowOptimizer], ...] = (SGD, Adagrad, RowWiseAdagrad, Adam)


def init_parameters(init: Init) -> tuple[InitKind, float, float]:
    """The kind of initial rows and its two parameters a and b."""
    match init:
        case Constant():
            return "constant", init.value, 0.0
        case Uniform():
            return "uniform", init.low, init.high
        case Normal():
            return "normal", init.mean, init.std
        case XavierUniform():
            return "xavier_uniform", init.gain, float(init.num_rows)
        case XavierNormal():
            return "xavier_normal", init.gain, float(init.num_rows)


def optimizer_parameters(optimizer: RowOptimizer) -> tuple[OptimizerKind, dict[str, Any]]:
    """The kind and the hyper-parameters by name; the learning rate travels with commits and is left out."""
    kind = OPTIMIZER_KINDS[_OPTIMIZERS.index(type(optimizer))]
    return kind, {key: value for key, value in dataclasses.asdict(optimizer).items() if key != "lr"}


def policy_parameters(policy: RowPolicy) -> dict[str, Any]:
    """The fields by name; ``evict_by`` is the native enum's number."""
    return {**dataclasses.asdict(policy), "evict_by": EVICT_BY.index(policy.evict_by)}
