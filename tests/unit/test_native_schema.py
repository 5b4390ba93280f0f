"""Every schema of the contract reaches the native store, field by field."""

from __future__ import annotations

import dataclasses

import pytest
from sparserow.cpp_ext import _server
from sparserow.proto.names import id_of_name
from sparserow.proto.schema import (
    DTYPES,
    SGD,
    Adagrad,
    Adam,
    Constant,
    Normal,
    RowWiseAdagrad,
    TableSchema,
    Uniform,
    XavierNormal,
    XavierUniform,
)
from sparserow.ps_server.shard.native_schema import native_init, native_optimizer, native_schema


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        (SGD(0.5, momentum=0.75, nesterov=True, weight_decay=0.25), "sgd"),
        (SGD(0.5, momentum=0.75, dampening=0.5), "sgd"),
        (Adagrad(0.5, eps=0.125, initial_accumulator=0.25, weight_decay=0.5), "adagrad"),
        (RowWiseAdagrad(0.5, eps=0.125, initial_accumulator=0.25, weight_decay=0.5), "rowwise_adagrad"),
        (Adam(0.5, beta1=0.5, beta2=0.75, eps=0.125, weight_decay=0.25), "adam"),
    ],
)
def test_hyper_parameters_arrive(optimizer, kind: str) -> None:
    native = native_optimizer(optimizer)
    assert native.kind == kind
    for field in dataclasses.fields(optimizer):
        if field.name != "lr":
            assert getattr(native, field.name) == getattr(optimizer, field.name)


@pytest.mark.parametrize(
    ("init", "kind", "a", "b"),
    [
        (Constant(0.5), "constant", 0.5, 0.0),
        (Uniform(-0.5, 0.25), "uniform", -0.5, 0.25),
        (Normal(0.5, 2.0), "normal", 0.5, 2.0),
        (XavierUniform(1024, gain=2.0), "xavier_uniform", 2.0, 1024.0),
        (XavierNormal(1024, gain=2.0), "xavier_normal", 2.0, 1024.0),
    ],
)
def test_initial_rows_arrive(init, kind: str, a: float, b: float) -> None:
    native = native_init(init)
    assert (native.kind, native.a, native.b) == (kind, a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_store_accepts_the_schema(dtype) -> None:
    schema = TableSchema("ads", "user", 12, Adam(), dtype=dtype, init=Normal(), seed=2**64 - 1, id=77, version=3)
    store = _server.Store(slot_count=64)
    store.create_table(native_schema(schema))
    stored = store.schema(77)
    assert (stored.name, stored.dim, stored.dtype, stored.seed, stored.version) == ("ads/user", 12, dtype, 2**64 - 1, 3)


def test_both_languages_hash_names_alike() -> None:
    for name in ("ads/user", "t\u00e4ble/\u00fc", "a/" + "b" * 255):
        assert _server.id_of_name(name) == id_of_name(name)
