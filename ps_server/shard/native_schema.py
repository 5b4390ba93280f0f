"""Converts a table's schema to the native store's classes (cpp_ext/schema/schema.h)."""

from __future__ import annotations

from ...cpp_ext import _server
from ...proto.native import init_parameters, optimizer_parameters, policy_parameters
from ...proto.optim import RowOptimizer
from ...proto.schema import Init, TableSchema


def native_init(init: Init) -> _server.InitSpec:
    """Returns the native form of the initial rows, with their kind and its two parameters a and b."""
    kind, a, b = init_parameters(init)
    return _server.InitSpec(kind=kind, a=a, b=b)


def native_optimizer(optimizer: RowOptimizer) -> _server.OptimizerSpec:
    """Returns the native form of an optimizer, without its learning rate, which travels with commits."""
    kind, parameters = optimizer_parameters(optimizer)
    return _server.OptimizerSpec(kind=kind, **parameters)


def native_schema(schema: TableSchema) -> _server.TableSchema:
    """Returns the native form of a schema, with the id and version that the coordinator gave."""
    return _server.TableSchema(
        id=schema.id,
        version=schema.version,
        name=schema.full_name,
        dim=schema.dim,
        dtype=schema.dtype,
        seed=schema.seed,
        init=native_init(schema.init),
        optimizer=native_optimizer(schema.optimizer),
        policy=policy_parameters(schema.policy),
    )
