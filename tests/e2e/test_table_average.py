"""The mean over ranks of local tables' gradients: processes, with ragged and empty ones, against the dense mean."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparserow.worker.training.process_group import joined_group
from sparserow.worker.training.table_average import average_gradients, leave_to_average
from sparserow_process import run_ranks

WORLD = 3
SHAPES = [(7, 4), (50, 1), (3, 16)]
STEPS = 5


def gradients(rank: int, step: int) -> list[torch.Tensor | None]:
    """With repeats; of rank 2 without rows in the second step, and of rank 0 none for the first table in the third."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    out: list[torch.Tensor | None] = []
    for table, (rows, dim) in enumerate(SHAPES):
        count = 0 if (rank, step) == (2, 1) else int(torch.randint(1, 20, (1,), generator=generator))
        ids = torch.randint(rows, (1, count), generator=generator)
        values = torch.randn(count, dim, generator=generator)
        is_none = (rank, step, table) == (0, 2, 0)
        out.append(None if is_none else torch.sparse_coo_tensor(ids, values, (rows, dim), check_invariants=False))
    return out


def act(rank: int, folder: Path) -> None:
    """One rank: the averages of each step, and a model whose table DDP leaves alone."""
    torch.set_num_threads(1)
    averages = []
    with joined_group(rank, WORLD, f"file://{folder}/meet"):
        weights = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        for step in range(STEPS):
            for weight, grad in zip(weights, gradients(rank, step), strict=True):
                weight.grad = grad
            average_gradients(weights)
            assert all(weight.grad is not None and weight.grad.is_coalesced() for weight in weights)
            averages.append([weight.grad.to_dense() for weight in weights if weight.grad is not None])
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(9, 2, sparse=True), nn.Linear(2, 1))
        leave_to_average(model, [module for module in model if isinstance(module, nn.Embedding)])
        ddp = DistributedDataParallel(model)
        ddp(torch.tensor([rank])).sum().backward()
        dist.barrier()
    torch.save((averages, [parameter.grad for parameter in model.parameters()]), folder / f"rank{rank}.pt")


def test_gradients_are_the_mean_over_ranks(tmp_path: Path) -> None:
    run_ranks(__file__, WORLD, tmp_path)
    saved = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(WORLD)]
    for step in range(STEPS):
        for table, (rows, dim) in enumerate(SHAPES):
            given = [gradients(rank, step)[table] for rank in range(WORLD)]
            mean = sum((grad.to_dense() for grad in given if grad is not None), torch.zeros(rows, dim)) / WORLD
            for averages, _ in saved:
                torch.testing.assert_close(averages[step][table], mean)
                assert torch.equal(averages[step][table], saved[0][0][step][table])
    for rank, (_, (of_table, of_weight, of_bias)) in enumerate(saved):
        assert of_table.coalesce().indices().tolist() == [[rank]]  # its own
        assert torch.equal(of_weight, saved[0][1][1])
        assert of_bias.tolist() == [1.0]


if __name__ == "__main__":
    act(int(sys.argv[1]), Path(sys.argv[2]))
