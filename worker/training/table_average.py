"""Averages the sparse gradients of local tables over the ranks, in three collective calls a step.

``DistributedDataParallel`` could do it, one table at a time. But in torch 2.13, the allreduce of sparse tensors over
gloo sometimes corrupts the process's memory. Two processes of plain torch with 26 ``nn.Embedding(sparse=True)`` end
with "malloc(): unaligned tcache chunk detected" within minutes. So DDP leaves the tables out
(:func:`leave_to_average`), and this module sends only dense tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def leave_to_average(model: nn.Module, tables: Sequence[nn.Embedding | nn.EmbeddingBag]) -> None:
    """Makes DDP neither reduce these tables' gradients nor send their weights; call it before DDP wraps the model.

    Args:
        model: the model, with the same weights on every rank.
        tables: the tables of the model to leave out.
    """
    weights = {id(table.weight) for table in tables}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in weights]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def average_gradients(weights: Sequence[nn.Parameter]) -> None:
    """Replaces each weight's gradient by the mean over ranks, coalesced and equal on every rank.

    Every rank of the default group must call it with the same weights. A rank without a gradient, or whose gradient
    has no row, counts with zeros.

    Args:
        weights: the weights of the tables, each (rows, dim), all of one dtype.
    """
    world = dist.get_world_size()
    mine = [_coalesced(weight) for weight in weights]
    counts = _gathered(torch.tensor([grad._nnz() for grad in mine]), world).tolist()
    dims = [weight.shape[1] for weight in weights]
    ids = _gathered_ragged([grad.indices().reshape(-1) for grad in mine], [sum(row) for row in counts])
    sizes = [[count * dim for count, dim in zip(row, dims, strict=True)] for row in counts]  # floats, by rank and table
    values = _gathered_ragged([grad.values().reshape(-1) / world for grad in mine], [sum(row) for row in sizes])
    ids_by_rank = [part.split(row) for part, row in zip(ids, counts, strict=True)]
    values_by_rank = [part.split(row) for part, row in zip(values, sizes, strict=True)]
    for index, weight in enumerate(weights):
        rows = torch.cat([parts[index] for parts in ids_by_rank])
        grads = torch.cat([parts[index] for parts in values_by_rank]).view(-1, dims[index])
        summed = torch.sparse_coo_tensor(rows.unsqueeze(0), grads, weight.shape, check_invariants=False)
        weight.grad = summed.coalesce()


def _coalesced(weight: nn.Parameter) -> torch.Tensor:
    if weight.grad is not None:
        return weight.grad.coalesce()
    none = torch.zeros(1, 0, dtype=torch.int64)
    return torch.sparse_coo_tensor(none, weight.new_zeros(0, weight.shape[1]), weight.shape, is_coalesced=True)


def _gathered(mine: torch.Tensor, world: int) -> torch.Tensor:
    """Gathers a tensor of shape (n) from each rank into one of shape (world, n)."""
    out = mine.new_empty(world, len(mine))
    dist.all_gather(list(out), mine)
    return out


def _gathered_ragged(mine: Sequence[torch.Tensor], lengths: Sequence[int]) -> list[torch.Tensor]:
    """Gathers every rank's pieces, joined to a tensor of length ``lengths[rank]``; padding is sent and removed."""
    padded = mine[0].new_zeros(max(*lengths, 1))
    torch.cat(list(mine), out=padded[: sum(len(piece) for piece in mine)])
    return [part[:length] for part, length in zip(_gathered(padded, len(lengths)), lengths, strict=True)]
