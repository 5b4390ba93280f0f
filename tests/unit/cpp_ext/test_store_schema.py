"""Every field of a native schema is checked, and the message names it."""

import math

import pytest

from sparserow.cpp_ext import _server
from sparserow.proto.errors import FailedPrecondition, InvalidArgument, NotFound, error_of

GOOD = {"id": 1, "name": "n/t", "dim": 4}


@pytest.fixture
def store():
    _server.set_error_factory(error_of)
    return _server.Store()


def schema(init=None, optimizer=None, **fields):
    return _server.TableSchema(
        **{**GOOD, **fields},
        init=_server.InitSpec(**(init or {})),
        optimizer=_server.OptimizerSpec(**(optimizer or {})),
    )


BAD = [
    ("id", {"id": 0}),
    ("version", {"version": 0}),
    ("name", {"name": ""}),
    ("name", {"name": "n" * 1025}),
    ("dim", {"dim": 0}),
    ("dim", {"dim": 16385}),
    ("init.a", {"init": {"kind": "constant", "a": math.nan}}),
    ("init.b", {"init": {"kind": "uniform", "a": 1.0, "b": 0.5}}),
    ("init.b", {"init": {"kind": "uniform", "a": 0.0, "b": math.inf}}),
    ("init.b", {"init": {"kind": "normal", "a": 0.0, "b": -1.0}}),
    ("init.a", {"init": {"kind": "xavier_uniform", "a": 0.0, "b": 10.0}}),
    ("init.b", {"init": {"kind": "xavier_normal", "a": 1.0, "b": 0.0}}),
    ("optimizer.momentum", {"optimizer": {"kind": "sgd", "momentum": 1.0}}),
    ("optimizer.momentum", {"optimizer": {"kind": "adam", "momentum": 0.5}}),
    ("optimizer.dampening", {"optimizer": {"kind": "sgd", "momentum": 0.5, "dampening": 1.5}}),
    ("optimizer.dampening", {"optimizer": {"kind": "adagrad", "dampening": 0.5}}),
    ("optimizer.nesterov", {"optimizer": {"kind": "sgd", "nesterov": True}}),
    ("optimizer.nesterov", {"optimizer": {"kind": "sgd", "momentum": 0.5, "dampening": 0.5, "nesterov": True}}),
    ("optimizer.nesterov", {"optimizer": {"kind": "adam", "nesterov": True}}),
    ("optimizer.weight_decay", {"optimizer": {"kind": "adam", "weight_decay": -1e-3}}),
    ("optimizer.weight_decay", {"optimizer": {"kind": "sgd", "weight_decay": math.nan}}),
    ("optimizer.eps", {"optimizer": {"kind": "adagrad", "eps": 0.0}}),
    ("optimizer.eps", {"optimizer": {"kind": "sgd", "eps": 0.5}}),
    ("optimizer.initial_accumulator", {"optimizer": {"kind": "adagrad", "initial_accumulator": -1.0}}),
    ("optimizer.initial_accumulator", {"optimizer": {"kind": "sgd", "initial_accumulator": 1.0}}),
    ("optimizer.beta1", {"optimizer": {"kind": "adam", "beta1": 1.0}}),
    ("optimizer.beta1", {"optimizer": {"kind": "sgd", "beta1": 0.5}}),
    ("optimizer.beta2", {"optimizer": {"kind": "adam", "beta2": -0.1}}),
    ("optimizer.beta2", {"optimizer": {"kind": "rowwise_adagrad", "beta2": 0.5}}),
    ("optimizer.accumulator_decay", {"optimizer": {"kind": "adagrad", "accumulator_decay": 0.0}}),
    ("optimizer.accumulator_decay", {"optimizer": {"kind": "adam", "accumulator_decay": 0.5}}),
    ("optimizer.amsgrad", {"optimizer": {"kind": "lamb", "amsgrad": True}}),
    ("optimizer.alpha", {"optimizer": {"kind": "rmsprop", "alpha": 1.0}}),
    ("optimizer.alpha", {"optimizer": {"kind": "adadelta", "alpha": 0.5}}),
    ("optimizer.centered", {"optimizer": {"kind": "adam", "centered": True}}),
    ("optimizer.rho", {"optimizer": {"kind": "adadelta", "rho": math.nan}}),
    ("optimizer.rho", {"optimizer": {"kind": "rmsprop", "rho": 0.5}}),
    ("optimizer.beta", {"optimizer": {"kind": "ftrl", "beta": 0.0}}),
    ("optimizer.beta", {"optimizer": {"kind": "lion", "beta": 0.5}}),
    ("optimizer.l1", {"optimizer": {"kind": "ftrl", "l1": -1.0}}),
    ("optimizer.l1", {"optimizer": {"kind": "sgd", "l1": 1.0}}),
    ("optimizer.l2", {"optimizer": {"kind": "ftrl", "l2": math.inf}}),
    ("optimizer.l2", {"optimizer": {"kind": "adam", "l2": 1.0}}),
    ("optimizer.group_lasso", {"optimizer": {"kind": "ftrl", "group_lasso": -0.5}}),
    ("optimizer.group_lasso", {"optimizer": {"kind": "adagrad", "group_lasso": 0.5}}),
    ("optimizer.eps", {"optimizer": {"kind": "ftrl", "eps": 0.5}}),
]


@pytest.mark.parametrize(("field", "change"), BAD)
def test_a_bad_field_is_refused_by_name(store, field, change):
    with pytest.raises(InvalidArgument, match=rf"TableSchema\.{field}: .* allowed: "):
        store.create_table(schema(**change))
    assert store.stats() == []


def test_unknown_names_list_the_allowed_ones(store):
    with pytest.raises(InvalidArgument, match="allowed: float32, bfloat16, float16"):
        schema(dtype="float64")
    with pytest.raises(InvalidArgument, match=r"allowed: sgd, adagrad, rowwise_adagrad, adam, rmsprop, .*, ftrl"):
        schema(optimizer={"kind": "adamax"})
    with pytest.raises(InvalidArgument, match="OptimizerSpec: 'gamma' is not allowed; allowed: momentum, dampening, "):
        schema(optimizer={"kind": "adam", "gamma": 0.5})
    with pytest.raises(
        InvalidArgument, match=r"rho: 0\.5 .*, as adam has no such option; it has weight_decay, .*beta1"
    ):
        store.create_table(schema(optimizer={"kind": "adam", "rho": 0.5}))
    with pytest.raises(InvalidArgument, match="allowed: constant, uniform"):
        schema(init={"kind": "zeros"})


DIFFERENT = [
    ("name", {"name": "n/u"}),
    ("version", {"version": 2}),
    ("dim", {"dim": 5}),
    ("dtype", {"dtype": "bfloat16"}),
    ("seed", {"seed": 1}),
    ("init.kind", {"init": {"kind": "normal"}}),
    ("init.a", {"init": {"a": 1.0}}),
    ("init.b", {"init": {"b": 1.0}}),
    ("optimizer.kind", {"optimizer": {"kind": "adagrad"}}),
    ("optimizer.momentum", {"optimizer": {"momentum": 0.5}}),
    ("optimizer.weight_decay", {"optimizer": {"weight_decay": 0.5}}),
    ("optimizer.decoupled", {"optimizer": {"decoupled": True}}),
]


@pytest.mark.parametrize(("field", "change"), DIFFERENT)
def test_another_schema_of_the_same_id_is_refused_by_field(store, field, change):
    store.create_table(schema())
    store.create_table(schema())  # idempotent
    with pytest.raises(FailedPrecondition, match=rf"table n/t: {field} is .*, requested "):
        store.create_table(schema(**change))


def test_arrays_are_checked_not_converted(store):
    import numpy as np

    store.create_table(schema())
    keys, rows = np.arange(3, dtype=np.uint64), np.zeros((3, 4), np.float32)
    for bad in (keys.astype(np.int64), keys.reshape(3, 1), np.arange(6, dtype=np.uint64)[::2]):
        with pytest.raises(InvalidArgument, match="keys: allowed"):
            store.pull(1, bad)
    for bad in (rows.astype(np.float64), rows[:2], rows[:, :3], rows.T.copy().T):
        with pytest.raises(InvalidArgument, match=r"grads: allowed: .*\(3, 4\)"):
            store.apply(1, keys, bad, lr=0.1)
    with pytest.raises(NotFound, match="table id 9"):
        store.pull(9, keys)
    with pytest.raises(InvalidArgument, match="slot_count"):
        _server.Store(slot_count=100)
