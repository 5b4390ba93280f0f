"""The mean over ranks of local tables' sparse gradients, in three collectives a step.

``DistributedDataParallel`` would do it, a table at a time; but the allreduce of sparse tensors of torch 2.13 over gloo
corrupts the process's memory now and then: two processes of plain torch with 26 ``nn.Embedding(sparse=True)`` end with
"malloc(): unaligned tcache chunk detected" within minutes. So tables are left out of it (:func:`leave_to_average`), and
only dense tensors are sent here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def leave_to_average(model: nn.Module, tables: Sequence[nn.Embedding]) -> None:
    """Before ``DistributedDataParallel(model)``: it neither reduces these tables' gradients nor sends their weights.

    Args:
        model: with the same weights on every rank.
        tables: of the model.
    """
    weights = {id(table.weight) for table in tables}
    names = [name for name, parameter in model.named_parameters() if id(parameter) in weights]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def average_gradients(weights: Sequence[nn.Parameter]) -> None:
    """Each weight's gradient becomes the mean over ranks, coalesced; on every rank the same.

    A collective: every rank of the default group calls it with the same weights, each (rows, dim) of one dtype. A rank
    without a gradient, or whose gradient has no row, counts with zeros.
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
    """(n) of each rank -> (world, n)."""
    out = mine.new_empty(world, len(mine))
    dist.all_gather(list(out), mine)
    return out


def _gathered_ragged(mine: Sequence[torch.Tensor], lengths: Sequence[int]) -> list[torch.Tensor]:
    """Every rank's pieces one after the other, ``lengths[rank]`` long; shorter ones are padded on the way."""
    padded = mine[0].new_zeros(max(*lengths, 1))
    torch.cat(list(mine), out=padded[: sum(len(piece) for piece in mine)])
    return [part[:length] for part, length in zip(_gathered(padded, len(lengths)), lengths, strict=True)]
