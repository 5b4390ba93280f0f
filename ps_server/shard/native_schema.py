"""A table's schema as the native store takes it (cpp_ext/schema/schema.h)."""

from __future__ import annotations

from ...cpp_ext import _server
from ...proto.native import init_parameters, optimizer_parameters, policy_parameters
from ...proto.schema import Init, RowOptimizer, TableSchema


def native_init(init: Init) -> _server.InitSpec:
    """The two parameters a and b of every kind of initial row."""
    kind, a, b = init_parameters(init)
    return _server.InitSpec(kind=kind, a=a, b=b)


def native_optimizer(optimizer: RowOptimizer) -> _server.OptimizerSpec:
    """The hyper-parameters by name; the learning rate travels with commits and is left out."""
    kind, parameters = optimizer_parameters(optimizer)
    return _server.OptimizerSpec(kind=kind, **parameters)


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
        policy=policy_parameters(schema.policy),
    )
