"""A table's schema as the native store takes it (cpp_ext/store/schema.h)."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

from ...cpp_ext import _server
from ...proto.schema import (
    SGD,
    Adagrad,
    Adam,
    Constant,
    Init,
    Normal,
    RowOptimizer,
    RowWiseAdagrad,
    TableSchema,
    Uniform,
    XavierNormal,
    XavierUniform,
)

_OptimizerKind: TypeAlias = Literal["sgd", "adagrad", "rowwise_adagrad", "adam"]
_OPTIMIZER_KINDS: dict[type[RowOptimizer], _OptimizerKind] = {
    SGD: "sgd",
    Adagrad: "adagrad",
    RowWiseAdagrad: "rowwise_adagrad",
    Adam: "adam",
}


def native_init(init: Init) -> _server.InitSpec:
    """The two parameters a and b of every kind of initial row."""
    match init:
        case Constant():
            return _server.InitSpec(kind="constant", a=init.value)
        case Uniform():
            return _server.InitSpec(kind="uniform", a=init.low, b=init.high)
        case Normal():
            return _server.InitSpec(kind="normal", a=init.mean, b=init.std)
        case XavierUniform():
            return _server.InitSpec(kind="xavier_uniform", a=init.gain, b=init.num_rows)
        case XavierNormal():
            return _server.InitSpec(kind="xavier_normal", a=init.gain, b=init.num_rows)


def native_optimizer(optimizer: RowOptimizer) -> _server.OptimizerSpec:
    """The hyper-parameters by name; the learning rate travels with commits and is left out."""
    parameters = {key: value for key, value in dataclasses.asdict(optimizer).items() if key != "lr"}
    return _server.OptimizerSpec(kind=_OPTIMIZER_KINDS[type(optimizer)], **parameters)


def native_schema(schema: TableSchema) -> _server.TableSchema:
    """The whole schema, with the id and version that the coordinator gave."""
    return _server.TableSchema(
        id=schema.id,
        version=schema.version,
        name=schema.full_name,
        dim=schema.dim,
        dtype=schema.dtype,
        seed=schema.seed,
        init=native_init(schema.init),
        optimizer=native_optimizer(schema.optimizer),
    )
