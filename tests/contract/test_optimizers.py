"""Each server-side optimizer against torch.optim run on every row alone: a row without a gradient does not move.

The reference keeps one torch parameter and one optimizer per row, as Adam's step count is per row.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from sparserow.cpp_ext import _server
from sparserow.proto.errors import error_of

STEPS, KEYS, BATCH = 500, 24, 8
BORN_LATE = 6  # keys that first appear after step 250
LR = 0.05
INIT = {"kind": "uniform", "a": -0.5, "b": 0.5}


class RowWiseAdagrad(torch.optim.Optimizer):
    """torch has none: one accumulator per row, of the mean squared gradient."""

    def __init__(self, params, lr, eps=1e-10, weight_decay=0.0, initial_accumulator_value=0.0):
        super().__init__(params, {"lr": lr})
        self.eps, self.weight_decay, self.sum = eps, weight_decay, initial_accumulator_value

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                grad = param.grad + self.weight_decay * param
                self.sum = self.sum + grad.square().mean()
                param -= group["lr"] * grad / (self.sum.sqrt() + self.eps)


@dataclass(frozen=True)
class Twin:
    """A native optimizer and what torch calls the same."""

    name: str
    native: dict
    torch_class: type
    torch_args: dict = field(default_factory=dict)


TWINS = [
    Twin("sgd", {"kind": "sgd"}, torch.optim.SGD),
    Twin("sgd-decay", {"kind": "sgd", "weight_decay": 0.01}, torch.optim.SGD, {"weight_decay": 0.01}),
    Twin("momentum", {"kind": "sgd", "momentum": 0.9}, torch.optim.SGD, {"momentum": 0.9}),
    Twin(
        "dampening",
        {"kind": "sgd", "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.01},
        torch.optim.SGD,
        {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.01},
    ),
    Twin(
        "nesterov",
        {"kind": "sgd", "momentum": 0.9, "nesterov": True},
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True},
    ),
    Twin("adagrad", {"kind": "adagrad"}, torch.optim.Adagrad),
    Twin(
        "adagrad-full",
        {"kind": "adagrad", "initial_accumulator": 0.2, "weight_decay": 0.01, "eps": 1e-6},
        torch.optim.Adagrad,
        {"initial_accumulator_value": 0.2, "weight_decay": 0.01, "eps": 1e-6},
    ),
    Twin("rowwise_adagrad", {"kind": "rowwise_adagrad"}, RowWiseAdagrad),
    Twin(
        "rowwise_adagrad-full",
        {"kind": "rowwise_adagrad", "initial_accumulator": 0.2, "weight_decay": 0.01, "eps": 1e-6},
        RowWiseAdagrad,
        {"initial_accumulator_value": 0.2, "weight_decay": 0.01, "eps": 1e-6},
    ),
    Twin("adam", {"kind": "adam", "eps": 1e-8}, torch.optim.Adam),
    Twin(
        "adam-full",
        {"kind": "adam", "eps": 1e-6, "beta1": 0.8, "beta2": 0.99, "weight_decay": 0.01},
        torch.optim.Adam,
        {"eps": 1e-6, "betas": (0.8, 0.99), "weight_decay": 0.01},
    ),
]


def make_store(twin: Twin, dim: int, dtype: str) -> _server.Store:
    _server.set_error_factory(error_of)
    store = _server.Store()
    schema = _server.TableSchema(
        id=1,
        name="n/t",
        dim=dim,
        dtype=dtype,
        seed=3,
        init=_server.InitSpec(**INIT),
        optimizer=_server.OptimizerSpec(**twin.native),
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


def batches(dim: int):
    """Keys (some twice in a batch), gradients and learning rate of each step; late keys come in the second half."""
    rng = np.random.default_rng(dim)
    for step in range(STEPS):
        known = KEYS if step >= STEPS // 2 else KEYS - BORN_LATE
        keys = rng.integers(known, size=BATCH).astype(np.uint64)
        if step % 3:
            keys = np.unique(keys)
        grads = rng.standard_normal((len(keys), dim), np.float32)
        yield keys, grads, LR * (0.5 if step % 100 > 80 else 1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dim", [1, 7, 16, 64])
@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_equals_torch_on_each_row_alone(twin, dim, dtype):
    store = make_store(twin, dim, dtype)
    everything = np.arange(KEYS, dtype=np.uint64)
    start, _, found = store.pull(1, everything)
    assert not found.any()
    reference = TorchRows(twin, start)
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
