"""Every schema of the contract reaches the native store, field by field."""

from __future__ import annotations

import dataclasses

import pytest

from sparserow.cpp_ext import _client, _server
from sparserow.proto.names import id_of_name
from sparserow.proto.native import schema_parameters
from sparserow.proto.optim import (
    FTRL,
    LAMB,
    OPTIMIZERS,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Lion,
    RMSprop,
    RowOptimizer,
    RowWiseAdagrad,
)
from sparserow.proto.schema import DTYPES, Constant, Normal, TableSchema, Uniform, XavierNormal, XavierUniform
from sparserow.ps_server.shard.native_schema import native_init, native_optimizer, native_schema


@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        (SGD(0.5, momentum=0.75, nesterov=True, weight_decay=0.25), "sgd"),
        (SGD(0.5, momentum=0.75, dampening=0.5), "sgd"),
        (Adagrad(0.5, eps=0.125, initial_accumulator=0.25, weight_decay=0.5), "adagrad"),
        (RowWiseAdagrad(0.5, eps=0.125, initial_accumulator=0.25, weight_decay=0.5), "rowwise_adagrad"),
        (Adagrad(0.5, eps=0.125, accumulator_decay=0.5, decoupled=True), "adagrad"),
        (Adam(0.5, betas=(0.5, 0.75), eps=0.125, weight_decay=0.25, decoupled=True, amsgrad=True), "adam"),
        (RMSprop(0.5, alpha=0.5, eps=0.125, momentum=0.25, centered=True), "rmsprop"),
        (Adadelta(0.5, rho=0.5, eps=0.125, weight_decay=0.25), "adadelta"),
        (Lion(0.5, betas=(0.5, 0.75), weight_decay=0.25), "lion"),
        (LAMB(0.5, betas=(0.5, 0.75), eps=0.125, decoupled=False), "lamb"),
        (FTRL(0.5, beta=0.5, l1=0.25, l2=0.125, group_lasso=2.0, weight_decay=0.25, decoupled=True), "ftrl"),
    ],
)
def test_hyper_parameters_arrive(optimizer, kind: str) -> None:
    native = native_optimizer(optimizer)
    assert native.kind == kind
    for field in dataclasses.fields(optimizer):
        if field.name == "betas":
            assert (native.beta1, native.beta2) == optimizer.betas
        elif field.name != "lr":
            assert getattr(native, field.name) == getattr(optimizer, field.name)


LAYOUTS = [
    *(each() for each in OPTIMIZERS.values()),
    SGD(momentum=0.5),
    Adam(amsgrad=True),
    RMSprop(momentum=0.5),
    RMSprop(centered=True),
    RMSprop(momentum=0.5, centered=True),
    FTRL(group_lasso=1.0),
]


@pytest.mark.parametrize("optimizer", LAYOUTS, ids=lambda value: value.state_layout)
def test_both_languages_count_the_state_alike(optimizer: RowOptimizer) -> None:
    for dim in (1, 7, 64):
        schema = TableSchema("ads", "user", dim, optimizer, id=7)
        assert _client.FlatRows(**schema_parameters(schema)).state_floats == optimizer.state_floats(dim)


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
