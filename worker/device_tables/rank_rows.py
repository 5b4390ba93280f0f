"""One rank's rows of a table on devices: weights, optimizer state and update counts, and how a step changes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...cpp_ext import _client
from ...cpp_ext.device import row_optimizers
from ...cpp_ext.device.row_optimizers import RowsToUpdate
from ...proto.errors import not_allowed
from ...proto.native import optimizer_parameters, schema_parameters
from ...proto.schema import TableSchema
from .share import Share

_FILL_ROWS = 65536  # rows that are written at once at the start


@dataclass(frozen=True)
class Block:
    """The gradients that one rank sends for rows of this rank.

    Attributes:
        rows: the numbers of the rows, (n) int64, unique.
        grads: the sums of the rank's step, (n, dim) float32.
    """

    rows: Tensor
    grads: Tensor


@dataclass(frozen=True)
class StepOfRows:
    """One step's change of a rank's rows, which has changed nothing yet.

    Attributes:
        blocks: of each rank, in rank order.
        lr: the learning rate.
        moved: on a device, the rows, weights, state and update counts after the step; None on the host, where the
            kernels write in place.
    """

    blocks: Sequence[Block]
    lr: float
    moved: tuple[Tensor, Tensor, Tensor, Tensor] | None


def floats_of_state(schema: TableSchema) -> int:
    """Returns the number of float32 values of optimizer state of a row."""
    return int(_native(schema).state_floats)


def bytes_of_rows(schema: TableSchema, rows: int) -> int:
    """Returns the memory of rows of a table on a device, in bytes: weights, optimizer state and update counts."""
    return rows * 4 * (schema.dim + floats_of_state(schema) + 1)


def check_optimizer(schema: TableSchema) -> None:
    """Raises InvalidArgument when no kernel of the optimizer runs on devices."""
    kind, _ = optimizer_parameters(schema.optimizer)
    if kind not in row_optimizers.KERNELS:
        raise not_allowed(
            f"tables[{schema.name!r}].optimizer", kind, f"on devices: {', '.join(row_optimizers.KERNELS)}"
        )


class RankRows:
    """The rows of one table that one rank has.

    On the host the arithmetic is that of a shard, bit for bit; on another device torch's operations do it.

    Args:
        schema: the schema of the table, with its id.
        share: the division of its keys.
        rank: this rank.
        device: where the rows are.
        zeros: the key whose first row is zeros, as a padding row is; None: there is none.

    Attributes:
        schema: the schema.
        share: the division.
        rank: the rank.
        weights: (rows, dim) float32.
        state: (rows, floats of state) float32.
        update_counts: (rows) int32.
    """

    def __init__(
        self, schema: TableSchema, share: Share, rank: int, device: torch.device, *, zeros: int | None = None
    ) -> None:
        self.schema, self.share, self.device = schema, share, device
        self.rank = rank
        self._native = _native(schema)
        self._kind, self._parameters = optimizer_parameters(schema.optimizer)
        rows = share.size(rank)
        self.weights = torch.empty(rows, schema.dim, device=device)
        self.state = torch.empty(rows, self._native.state_floats, device=device)
        self.update_counts = torch.zeros(rows, dtype=torch.int32, device=device)
        keys = share.keys_of(rank).numpy().astype(np.uint64)
        for begin in range(0, rows, _FILL_ROWS):
            part = keys[begin : begin + _FILL_ROWS]
            end = begin + len(part)
            initial = self._native.initial(part)
            self.weights[begin:end] = torch.from_numpy(initial).to(device)
            self.state[begin:end] = torch.from_numpy(self._native.initial_state(initial)).to(device)
        if zeros is not None:
            self.set_weights(torch.tensor([zeros]), torch.zeros(1, schema.dim))

    @property
    def bytes(self) -> int:
        """The memory of the rows, in bytes."""
        return sum(each.numel() * each.element_size() for each in (self.weights, self.state, self.update_counts))

    def fresh_state(self, weights: Tensor) -> Tensor:
        """Returns the state that rows of these weights, (rows, dim) float32 on the host, have before their first
        update, on the host.
        """
        return torch.from_numpy(self._native.initial_state(weights.numpy()))

    def read(self, keys: Tensor) -> Tensor:
        """Returns the weights of keys of this rank, (n, dim) float32."""
        return self.weights.index_select(0, self.share.rows(keys))

    def set_weights(self, keys: Tensor, weights: Tensor) -> None:
        """Sets the weights of those keys that this rank has.

        Args:
            keys: the keys, (n) int64 on the host, also of other ranks.
            weights: their rows, (n, dim) float32 on the host.
        """
        is_mine = self.share.owners(keys) == self.rank
        rows = self.share.rows(keys[is_mine]).to(self.device)
        self.weights.index_copy_(0, rows, weights[is_mine].to(self.device))

    def step(self, blocks: Sequence[Block], *, grad_sum: bool, lr: float) -> StepOfRows:
        """Prepares one step. Nothing is changed, and :meth:`apply` needs no memory on a device.

        Args:
            blocks: of each rank, in rank order.
            grad_sum: whether gradients are summed over the ranks, or else averaged.
            lr: the learning rate.
        """
        if self.device.type == "cpu":
            return StepOfRows(blocks, lr, None)
        scale = 1.0 if grad_sum else 1.0 / len(blocks)
        rows, grads = row_optimizers.sum_blocks([(each.rows, each.grads) for each in blocks], scale)
        counts = self.update_counts.index_select(0, rows) + 1
        before = RowsToUpdate(self.weights.index_select(0, rows), self.state.index_select(0, rows), counts, grads)
        weights, state = row_optimizers.KERNELS[self._kind](before, self._parameters, lr)
        return StepOfRows(blocks, lr, (rows, weights, state, counts))

    def apply(self, step: StepOfRows, *, grad_sum: bool) -> None:
        """Changes the rows as ``step`` says."""
        if step.moved is not None:
            rows, weights, state, counts = step.moved
            self.weights.index_copy_(0, rows, weights)
            self.state.index_copy_(0, rows, state)
            self.update_counts.index_copy_(0, rows, counts)
            return
        self._native.apply(
            [(each.rows.numpy().astype(np.uint64), each.grads.numpy()) for each in step.blocks],
            workers=len(step.blocks),
            grad_sum=grad_sum,
            lr=step.lr,
            weights=self.weights.numpy(),
            state=self.state.numpy(),
            update_counts=self.update_counts.numpy().view(np.uint32),
        )


def _native(schema: TableSchema) -> _client.FlatRows:
    return _client.FlatRows(**schema_parameters(schema))
