"""A tensor is found in the memory of a batch: what is found has its values in this batch and its place in the next."""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparserow.worker.data.batch_tensors import tensors_of
from sparserow.worker.lookups.expressions import Expression, Root, Slice, Values
from sparserow.worker.lookups.parts import expression_in, memory_of

Batch = dict[str, Tensor]


def batch_of(draw: random.Random, shapes: dict[str, tuple[list[int], list[int], torch.dtype]]) -> Batch:
    """Tensors of these shapes, whose dimensions were turned as given, with values of their own."""
    return {
        name: torch.randint(0, 1 << 20, [sizes[dim] for dim in turned], generator=torch.Generator().manual_seed(seed))
        .to(dtype)
        .permute(*turned)
        for name, (sizes, turned, dtype) in shapes.items()
        for seed in [draw.randrange(1 << 30)]
    }


def known(batch: Batch) -> list[tuple[Expression, tuple]]:
    return [(Root(path), memory_of(tensor)) for path, tensor in tensors_of(batch)]


def drawn_part(draw: random.Random, whole: Tensor) -> Callable[[Tensor], Tensor]:
    dim = draw.randrange(whole.dim())
    start = draw.randrange(whole.size(dim))
    length = draw.randint(1, whole.size(dim) - start)
    return draw.choice(
        [
            lambda tensor: tensor,
            lambda tensor: tensor.select(dim, start),
            lambda tensor: tensor.narrow(dim, start, length),
            lambda tensor: tensor.unbind(dim)[start],
        ]
    )


def test_parts_of_a_batch_are_found_in_the_next_one() -> None:
    seed = int(os.environ.get("SPARSEROW_TEST_SEED", secrets.randbits(32)))
    print(f"SPARSEROW_TEST_SEED={seed}")
    draw = random.Random(seed)
    found_parts = 0
    for _ in range(300):
        shapes = {}
        for name in ("a", "b"):
            sizes = [draw.randint(1, 5) for _ in range(draw.randint(1, 3))]
            turned = draw.sample(range(len(sizes)), len(sizes))
            shapes[name] = (sizes, turned, draw.choice([torch.int64, torch.int32]))
        batch, later = batch_of(draw, shapes), batch_of(draw, shapes)
        name = draw.choice("ab")
        part = drawn_part(draw, batch[name])
        tensor = part(batch[name])
        expression = expression_in(memory_of(tensor), known(batch))
        assert expression is not None, (shapes, name)
        for given in (batch, later):
            value = Values(given, lambda tensor: tensor).of(expression)
            assert value is not None
            assert torch.equal(value, part(given[name])), (shapes, expression)
        found_parts += isinstance(expression, Slice)
    assert found_parts > 50, "most of them are parts of a tensor"


NO_PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "every second": lambda ids: ids[::2],
    "two dimensions": lambda ids: ids[1:3, 1:3],
    "a diagonal": lambda ids: ids.diagonal(),
    "flat": lambda ids: ids.view(-1),
    "turned": lambda ids: ids.t(),
    "of other memory": lambda ids: ids[:, 0].clone(),
    "of other bytes": lambda ids: ids.view(torch.int32)[:, 0],
    "nothing": lambda ids: ids[:0, :0],
}


@pytest.mark.parametrize("way", NO_PARTS)
def test_other_views_are_no_parts(way: str) -> None:
    batch = {"ids": torch.arange(24).view(6, 4)}
    assert expression_in(memory_of(NO_PARTS[way](batch["ids"])), known(batch)) is None


def test_a_tensor_without_memory_explains_nothing() -> None:
    empty = {"ids": torch.empty(0, 4, dtype=torch.int64)}
    assert expression_in(memory_of(torch.empty(0, 4, dtype=torch.int64)), known(empty)) is None
    sparse = torch.eye(3, dtype=torch.int64).to_sparse()
    assert expression_in(memory_of(sparse), known({"ids": sparse})) is None
