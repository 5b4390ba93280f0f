"""Each server-side optimizer against torch.optim run on every row alone: a row without a gradient does not move.

The reference keeps one torch parameter and one optimizer per row, as Adam's step count is per row. Where torch has no
such optimizer, the reference is a transcription in float64 (tests/support/literal_optimizers.py).
"""

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
from torch import optim

from literal_optimizers import LiteralRow, McMahanRow
from long_form import FULL
from sparserow.cpp_ext import _server
from sparserow.proto.errors import error_of
from sparserow.proto.native import optimizer_parameters
from sparserow.proto.optim import (
    FTRL,
    LAMB,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AdamW,
    Lion,
    RMSprop,
    RowOptimizer,
    RowWiseAdagrad,
)

STEPS, KEYS, BATCH = 500, 24, 8
CREATED_LATE = 6  # keys that first appear after step 250
LR = 0.05
INIT = {"kind": "uniform", "a": -0.5, "b": 0.5}
EVERY_SHAPE = [(dim, dtype) for dim in (1, 7, 16, 64) for dtype in ("float32", "bfloat16", "float16")]
SHAPES = [(1, "float32"), (7, "float32"), (64, "float32"), (64, "bfloat16"), (64, "float16")]
if FULL:
    SHAPES = EVERY_SHAPE


@dataclass(frozen=True)
class Twin:
    """A native optimizer, and its class in torch; None where torch has none."""

    name: str
    native: RowOptimizer
    torch_class: type | None = None
    torch_args: dict = field(default_factory=dict)


DECAY = {"weight_decay": 0.01}
DECOUPLED = {"weight_decay": 0.1, "decoupled": True}
TWINS = [
    Twin("sgd", SGD(), optim.SGD),
    Twin("sgd-decay", SGD(**DECAY), optim.SGD, DECAY),
    Twin("sgd-decoupled", SGD(**DECOUPLED)),
    Twin("momentum", SGD(momentum=0.9), optim.SGD, {"momentum": 0.9}),
    Twin(
        "dampening",
        SGD(momentum=0.8, dampening=0.3, **DECAY),
        optim.SGD,
        {"momentum": 0.8, "dampening": 0.3, **DECAY},
    ),
    Twin("nesterov", SGD(momentum=0.9, nesterov=True), optim.SGD, {"momentum": 0.9, "nesterov": True}),
    Twin("adagrad", Adagrad(), optim.Adagrad),
    Twin(
        "adagrad-full",
        Adagrad(initial_accumulator=0.2, eps=1e-6, **DECAY),
        optim.Adagrad,
        {"initial_accumulator_value": 0.2, "eps": 1e-6, **DECAY},
    ),
    Twin("adagrad-forgets", Adagrad(accumulator_decay=0.9, **DECOUPLED)),
    Twin("rowwise_adagrad", RowWiseAdagrad()),
    Twin("rowwise_adagrad-full", RowWiseAdagrad(initial_accumulator=0.2, eps=1e-6, **DECAY)),
    Twin("rowwise_adagrad-forgets", RowWiseAdagrad(accumulator_decay=0.9, **DECOUPLED)),
    Twin("adam", Adam(), optim.Adam),
    Twin(
        "adam-full",
        Adam(eps=1e-6, betas=(0.8, 0.99), **DECAY),
        optim.Adam,
        {"eps": 1e-6, "betas": (0.8, 0.99), **DECAY},
    ),
    Twin("adamw", AdamW(), optim.AdamW),
    Twin("amsgrad", Adam(amsgrad=True, betas=(0.9, 0.9)), optim.Adam, {"amsgrad": True, "betas": (0.9, 0.9)}),
    Twin("rmsprop", RMSprop(), optim.RMSprop),
    Twin("rmsprop-momentum", RMSprop(momentum=0.8, **DECAY), optim.RMSprop, {"momentum": 0.8, **DECAY}),
    Twin("rmsprop-centered", RMSprop(alpha=0.9, centered=True), optim.RMSprop, {"alpha": 0.9, "centered": True}),
    Twin(
        "rmsprop-full",
        RMSprop(alpha=0.9, eps=1e-6, centered=True, momentum=0.5),
        optim.RMSprop,
        {"alpha": 0.9, "eps": 1e-6, "centered": True, "momentum": 0.5},
    ),
    Twin("rmsprop-decoupled", RMSprop(**DECOUPLED)),
    Twin("adadelta", Adadelta(), optim.Adadelta),
    Twin("adadelta-full", Adadelta(rho=0.8, eps=1e-3, **DECAY), optim.Adadelta, {"rho": 0.8, "eps": 1e-3, **DECAY}),
    Twin("adadelta-decoupled", Adadelta(**DECOUPLED)),
    Twin("lion", Lion()),
    Twin("lion-decay", Lion(weight_decay=0.1)),
    Twin("lion-coupled", Lion(betas=(0.8, 0.99), decoupled=False, **DECAY)),
    Twin("lamb", LAMB()),
    Twin("lamb-decay", LAMB(weight_decay=0.1)),
    Twin("lamb-coupled", LAMB(decoupled=False, **DECAY)),
    Twin("ftrl", FTRL()),
    Twin("ftrl-l1", FTRL(l1=1.0)),
    Twin("ftrl-decay", FTRL(beta=0.5, l1=0.5, l2=0.3, **DECAY)),
    Twin("ftrl-decoupled", FTRL(beta=0.5, l1=0.5, l2=0.3, **DECOUPLED)),
    Twin("ftrl-group", FTRL(group_lasso=1.0)),
    Twin("ftrl-full", FTRL(beta=0.5, l1=0.3, l2=0.3, group_lasso=0.5, **DECOUPLED)),
]
BY_NAME = {twin.name: twin for twin in TWINS}


def native_of(optimizer: RowOptimizer) -> _server.OptimizerSpec:
    kind, options = optimizer_parameters(optimizer)
    return _server.OptimizerSpec(kind=kind, **options)


def make_store(twin: Twin, dim: int, dtype: str, init: dict | None = None) -> _server.Store:
    _server.set_error_factory(error_of)
    store = _server.Store()
    schema = _server.TableSchema(
        id=1,
        name="n/t",
        dim=dim,
        dtype=dtype,
        seed=3,
        init=_server.InitSpec(**(init or INIT)),
        optimizer=native_of(twin.native),
    )
    store.create_table(schema)
    return store


class TorchRows:
    """The reference: each row a float32 parameter of its own with its own optimizer."""

    def __init__(self, twin: Twin, start: np.ndarray) -> None:
        self.rows = [torch.nn.Parameter(torch.from_numpy(row.copy())) for row in start]
        self.optimizers = [twin.torch_class([row], lr=LR, **twin.torch_args) for row in self.rows]

    def apply(self, keys: np.ndarray, grads: np.ndarray, lr: float) -> None:
        for key, grad in zip(keys.tolist(), grads, strict=True):
            self.rows[key].grad = torch.from_numpy(grad.copy())
            self.optimizers[key].param_groups[0]["lr"] = lr
            self.optimizers[key].step()

    def values(self) -> np.ndarray:
        return torch.stack([row.detach() for row in self.rows]).numpy()


class LiteralRows:
    """The reference where torch has no such optimizer, and transcriptions in float32."""

    def __init__(self, twin: Twin, start: np.ndarray, real: type) -> None:
        is_ftrl = isinstance(twin.native, FTRL) and real is np.float64
        make = partial(McMahanRow, lr=LR) if is_ftrl else partial(LiteralRow, real=real)
        self.rows = [make(twin.native, row) for row in start]

    def apply(self, keys: np.ndarray, grads: np.ndarray, lr: float) -> None:
        for key, grad in zip(keys.tolist(), grads, strict=True):
            self.rows[key].update(grad, lr)

    def values(self) -> np.ndarray:
        return np.stack([row.weights for row in self.rows])


def reference_of(twin: Twin, start: np.ndarray) -> TorchRows | LiteralRows:
    return TorchRows(twin, start) if twin.torch_class is not None else LiteralRows(twin, start, np.float64)


def batches(dim: int):
    """Keys (some twice in a batch), gradients and learning rate of each step; late keys come in the second half."""
    rng = np.random.default_rng(dim)
    for step in range(STEPS):
        known = KEYS if step >= STEPS // 2 else KEYS - CREATED_LATE
        keys = rng.integers(known, size=BATCH).astype(np.uint64)
        if step % 3:
            keys = np.unique(keys)
        grads = rng.standard_normal((len(keys), dim), np.float32)
        yield keys, grads, LR * (0.5 if step % 100 > 80 else 1.0)


@pytest.mark.parametrize(("dim", "dtype"), SHAPES)
@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_equals_torch_on_each_row_alone(twin, dim, dtype):
    store = make_store(twin, dim, dtype)
    everything = np.arange(KEYS, dtype=np.uint64)
    start, _, found = store.pull(1, everything)
    assert not found.any()
    reference = reference_of(twin, start)
    for keys, grads, lr in batches(dim):
        store.apply(1, keys, grads, lr=lr)
        reference.apply(keys, grads, lr)
    rows, versions, found = store.pull(1, everything)
    assert found.all()
    assert (versions > 0).all()
    expected = reference.values()
    if dtype == "float32":
        np.testing.assert_allclose(rows, expected, rtol=2e-4, atol=2e-5)
        return
    # Rounding adds at each of about 170 updates of a row an error of at most one unit, of zero mean: a random
    # walk. Its deviation is unit * sqrt(updates); six of them is the bound, momentum (1 / (1 - 0.9)) not included.
    unit = 2.0**-7 if dtype == "bfloat16" else 2.0**-10
    updates = STEPS * BATCH / KEYS
    scale = np.maximum(np.abs(expected), 1.0).max()
    assert np.abs(rows - expected).max() < 6 * unit * scale * np.sqrt(updates)
    # The mean over all columns averages the walks.
    if dim == 64:
        assert abs((rows - expected).mean()) < 6 * unit * scale * np.sqrt(updates) / np.sqrt(rows.size)


@pytest.mark.parametrize("dim", [7, 64])
@pytest.mark.parametrize(
    "twin",
    [each for each in TWINS if "group" not in each.name and each.name != "ftrl-full"],
    ids=lambda twin: twin.name,
)
def test_equals_its_transcription_in_float32(twin, dim):
    store = make_store(twin, dim, "float32")
    everything = np.arange(KEYS, dtype=np.uint64)
    literal = LiteralRows(twin, store.pull(1, everything)[0], np.float32)
    for keys, grads, lr in batches(dim):
        store.apply(1, keys, grads, lr=lr)
        literal.apply(keys, grads, lr)
    np.testing.assert_allclose(store.pull(1, everything)[0], literal.values(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_grad_scale_multiplies_the_gradient_first(twin):
    scaled, plain = make_store(twin, 7, "float32"), make_store(twin, 7, "float32")
    keys = np.arange(5, dtype=np.uint64)
    grads = np.random.default_rng(0).standard_normal((5, 7), np.float32)
    for _ in range(3):
        scaled.apply(1, keys, grads, lr=LR, grad_scale=0.25)
        plain.apply(1, keys, grads * np.float32(0.25), lr=LR)
    np.testing.assert_array_equal(scaled.pull(1, keys)[0], plain.pull(1, keys)[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_small_updates_are_not_lost_on_average(dtype):
    """1,000 steps of a tenth of the rounding unit each: round-to-nearest would not move at all."""
    store = make_store(TWINS[0], 64, dtype)
    keys = np.arange(200, dtype=np.uint64)
    store.assign(1, keys, np.ones((200, 64), np.float32))
    unit = 2.0**-7 if dtype == "bfloat16" else 2.0**-10
    step = 0.1 * unit / 10
    for _ in range(1000):
        store.apply(1, keys, np.full((200, 64), -1.0, np.float32), lr=step)
    moved = store.pull(1, keys)[0].mean() - 1.0
    # 12,800 walks of 1,000 steps, each of deviation below unit / 2.
    assert abs(moved - 1000 * step) < 5 * 0.5 * unit * np.sqrt(1000) / np.sqrt(12_800)
