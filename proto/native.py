"""Expresses a table's schema in the terms of the native store (``cpp_ext/schema/schema.h``), for both bindings."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias, cast

from .optim import OPTIMIZERS, RowOptimizer
from .schema import (
    DTYPES,
    EVICT_BY,
    Constant,
    Init,
    Normal,
    RowPolicy,
    TableSchema,
    Uniform,
    XavierNormal,
    XavierUniform,
)

InitKind: TypeAlias = Literal["constant", "uniform", "normal", "xavier_uniform", "xavier_normal"]
OptimizerKind: TypeAlias = Literal[
    "sgd", "adagrad", "rowwise_adagrad", "adam", "rmsprop", "adadelta", "lion", "lamb", "ftrl"
]

# These tuples have the order of the native enums.
INIT_KINDS: tuple[InitKind, ...] = ("constant", "uniform", "normal", "xavier_uniform", "xavier_normal")
OPTIMIZER_KINDS: tuple[OptimizerKind, ...] = tuple(cast(OptimizerKind, kind) for kind in OPTIMIZERS)


def init_parameters(init: Init) -> tuple[InitKind, float, float]:
    """Returns the kind of the initial rows and its two parameters a and b."""
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
    """Returns the kind and the hyper-parameters by name, without the learning rate, which travels with commits."""
    options = {key: value for key, value in dataclasses.asdict(optimizer).items() if key != "lr"}
    if "betas" in options:
        options["beta1"], options["beta2"] = options.pop("betas")
    return cast(OptimizerKind, optimizer.kind), options


def policy_parameters(policy: RowPolicy) -> dict[str, Any]:
    """Returns the fields of a policy by name; ``evict_by`` becomes the number in the native enum."""
    return {**dataclasses.asdict(policy), "evict_by": EVICT_BY.index(policy.evict_by)}


def schema_parameters(schema: TableSchema) -> dict[str, Any]:
    """Returns a schema as the keyword arguments of the client's binding; kinds are numbers in the native enums."""
    init, a, b = init_parameters(schema.init)
    optimizer, parameters = optimizer_parameters(schema.optimizer)
    return {
        "id": schema.id,
        "version": schema.version,
        "name": schema.full_name,
        "dim": schema.dim,
        "dtype": DTYPES.index(schema.dtype),
        "seed": schema.seed,
        "init": (INIT_KINDS.index(init), a, b),
        "optimizer": {"kind": OPTIMIZER_KINDS.index(optimizer), **parameters},
        "policy": policy_parameters(schema.policy),
    }
