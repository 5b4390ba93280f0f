"""Features for tests of models: random batches, a program as ``publish`` exports it, and equations in numpy."""

from __future__ import annotations

import inspect
import io
import itertools

import numpy as np
import torch
from torch import nn
from torch.export import Dim

from sparserow.worker.publish.program_export import ProgramSource, export_program


def numbers(samples: int, seed: int = 0):
    return torch.randn(samples, generator=torch.Generator().manual_seed(seed))


def keys(samples: int, seed: int = 0, below: int = 2**63 - 1):
    return torch.randint(0, below, (samples,), generator=torch.Generator().manual_seed(seed))


def lists(lengths, seed: int = 0, *, weights: bool = False, below: int = 2**63 - 1):
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64).cumsum(0)])
    count = int(offsets[-1])
    values = keys(count, seed, below), offsets
    return (*values, torch.rand(count, generator=torch.Generator().manual_seed(seed + 1)) + 0.5) if weights else values


def click_tensors(samples: int, is_empty: bool = False):
    """Two keys, two numbers and a list of each sample."""
    lengths = [0 if is_empty else (5 * sample + 2) % 4 for sample in range(samples)]
    return {
        "user": keys(samples, 1),
        "item": keys(samples, 2),
        "tags": lists(lengths, 3, weights=True),
        "age": numbers(samples, 4),
        "price": numbers(samples, 5),
    }


def click_fields(tables, tensors) -> np.ndarray:
    """The embeddings of ``user``, ``item`` and ``tags``, which are summed with their weights: (B, 3, dim)."""
    tags = [
        (rows_of(tables["tags"], some) * array(weights)[:, None]).sum(0)
        for some, weights in zip(parts(tensors["tags"]), parts(tensors["tags"][1:][::-1]), strict=True)
    ]
    return np.stack([*(rows_of(tables[name], tensors[name]) for name in ("user", "item")), np.stack(tags)], axis=1)


def click_inputs(tables, tensors) -> np.ndarray:
    """The embeddings and the numbers side by side."""
    fields = click_fields(tables, tensors)
    return np.concatenate([fields.reshape(len(fields), -1), array(tensors["age"])[:, None],
                           array(tensors["price"])[:, None]], axis=1)  # fmt: skip


CLICKS = {
    "rows": {"user": 40, "item": 500, "tags": 20},
    "numbers": ["age", "price"],
    "pools": {"tags": "sum"},
    "dim": 4,
    "init_scale": 0.5,
}


def array(tensor):
    return tensor.detach().double().numpy()


def rows_of(table: nn.Module, some_keys) -> np.ndarray:
    """The rows of keys in float64, looked up by numpy."""
    weight = array(table.weight)
    return weight[some_keys.numpy() % len(weight)]


def parts(feature) -> list[np.ndarray]:
    """The keys of each sample of a list."""
    values, offsets = feature[:2]
    return [values[begin:end] for begin, end in itertools.pairwise(offsets)]


def linear(layer: nn.Linear, x: np.ndarray) -> np.ndarray:
    return x @ array(layer.weight).T + (0 if layer.bias is None else array(layer.bias))


def perceptron(tower, x: np.ndarray) -> np.ndarray:
    """An MLP by its definition: affine maps, with max(x, 0) or PReLU between them."""
    for layer in tower:
        if isinstance(layer, nn.Linear):
            x = linear(layer, x)
        elif isinstance(layer, nn.PReLU):
            x = np.where(x > 0, x, array(layer.weight) * x)
        elif isinstance(layer, nn.ReLU):
            x = np.where(x > 0, x, 0)
        else:
            assert isinstance(layer, nn.Dropout)
    return x


def softmax(x: np.ndarray) -> np.ndarray:
    exponents = np.exp(x - x.max(-1, keepdims=True))
    return exponents / exponents.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class ByPosition(nn.Module):
    """A model that takes by position what another takes by name; torch.export counts the arguments of a signature."""

    def __init__(self, model: nn.Module, names) -> None:
        super().__init__()
        self.model, names = model, tuple(names)

        def forward(*tensors):
            return model(**dict(zip(names, tensors, strict=True)))

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        forward.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
        self.forward = forward


def exported(model: nn.Module, tensors):
    """The program that ``publish`` would write of a model, read again, as a function of tensors by name."""
    rows, shapes = Dim("rows", min=1), []
    for name, value in tensors.items():
        if isinstance(value, tuple):
            count = Dim(f"{name}_keys", min=0)
            shapes.append(({0: count}, {0: rows + 1}, *({0: count} for _ in value[2:])))
        else:
            shapes.append({0: rows})
    source = ProgramSource(ByPosition(model, tensors), tuple(tensors.values()), tuple(shapes))
    program = torch.export.load(io.BytesIO(export_program(source, is_signed=False).archive)).module()
    return lambda given: program(*(given[name] for name in tensors))


def assert_close(found, expected, rtol=1e-4, atol=1e-5):
    torch.testing.assert_close(found.detach().double(), torch.as_tensor(expected), rtol=rtol, atol=atol)


def assert_model(model: nn.Module, make) -> None:
    """What holds for every model: any batch, finite gradients, learning, and a program that computes the same.

    Args:
        model: the model, in which every parameter has an effect.
        make: makes tensors from the number of samples and whether lists are empty.
    """
    for samples, is_empty in ((0, True), (1, True), (3, True), (1, False), (17, False)):
        model.zero_grad()
        out = model(**make(samples, is_empty))
        for each in out.values() if isinstance(out, dict) else [out]:
            assert each.shape[0] == samples
            assert each.dtype == torch.float32
        total = sum(each.square().sum() for each in (out.values() if isinstance(out, dict) else [out]))
        total.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
            if samples == 0:
                assert not parameter.grad.any(), name
            if samples == 17:
                assert parameter.grad.any(), name
    model.eval()
    program = exported(model, make(4, False))
    for samples, is_empty in ((1, True), (1, False), (9, False)):
        tensors = make(samples, is_empty)
        torch.testing.assert_close(program(tensors), model(**tensors), rtol=1e-5, atol=1e-6)
