"""torch's ``EmbeddingBag(sparse=True)`` with ``torch.optim.Adagrad``, in one process: a plain matrix without a network.

``read`` is a forward of bags of one row. ``update`` is the optimizer's step alone. ``step`` is forward, backward and
the optimizer's step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .worker import Tools


def measure(asked: dict[str, Any], tools: Tools) -> None:
    """Measures a table of each dim, one after the other."""
    torch.set_num_threads(asked["threads"])
    torch.sparse.check_sparse_tensor_invariants.disable()  # the default, set because Adagrad warns otherwise
    tools.versions["torch"] = torch.__version__
    batches = (torch.from_numpy(keys) for keys in tools.batches())
    offsets = torch.arange(asked["keys"])
    for dim in tools.dims():
        bags = torch.nn.EmbeddingBag(asked["rows"], dim, mode="sum", sparse=True)
        optimizer = torch.optim.Adagrad(bags.parameters(), lr=0.01)
        factors = torch.from_numpy(tools.grads(dim))

        def read(keys: torch.Tensor, bags: torch.nn.EmbeddingBag = bags) -> None:
            with torch.no_grad():
                bags(keys, offsets)

        def set_grads(bags: torch.nn.EmbeddingBag = bags, factors: torch.Tensor = factors, dim: int = dim) -> None:
            shape = (asked["rows"], dim)
            bags.weight.grad = torch.sparse_coo_tensor(next(batches)[None], factors, shape, check_invariants=False)

        def update(_: None, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()

        def step(
            keys: torch.Tensor,
            bags: torch.nn.EmbeddingBag = bags,
            factors: torch.Tensor = factors,
            optimizer: torch.optim.Optimizer = optimizer,
        ) -> None:
            optimizer.zero_grad()
            (bags(keys, offsets) * factors).sum().backward()
            optimizer.step()

        tools.time("read", dim, batches.__next__, read)
        tools.time("update", dim, set_grads, update)
        tools.time("step", dim, batches.__next__, step)
