"""The rows of tables of one width and one optimizer that a rank has: one matrix, of which each table is a range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ...cpp_ext import _client
from ...cpp_ext.device import row_optimizers
from ...cpp_ext.device.row_optimizers import RowsToUpdate
from ...proto.errors import not_allowed
from ...proto.native import optimizer_parameters, schema_parameters
from ...proto.schema import TableSchema


@dataclass(frozen=True)
class Block:
    """The gradients that one rank sends for rows of this rank.

    Attributes:
        rows: the numbers of the rows in the matrix, (n) int64, unique, table by table.
        grads: the sums of the rank's step, (n, dim) float32.
        sizes: the number of rows of each table of the matrix.
    """

    rows: Tensor
    grads: Tensor
    sizes: Sequence[int]

    def of_tables(self, tables: Sequence[int]) -> Block:
        """Returns the gradients for some tables of the matrix, given by their places in ascending order."""
        rows, grads = self.rows.split(list(self.sizes)), self.grads.split(list(self.sizes))
        sizes = [size if place in tables else 0 for place, size in enumerate(self.sizes)]
        return Block(torch.cat([rows[each] for each in tables]), torch.cat([grads[each] for each in tables]), sizes)


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


def native_rows(schema: TableSchema) -> _client.FlatRows:
    """Returns the host's arithmetic of a table's rows."""
    return _client.FlatRows(**schema_parameters(schema))


def floats_of_state(schema: TableSchema) -> int:
    """Returns the number of float32 values of optimizer state of a row."""
    return int(native_rows(schema).state_floats)


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


def kind_of(schema: TableSchema) -> tuple[object, ...]:
    """Returns what tables of one matrix have in common: the width, and the optimizer without its learning rate."""
    kind, options = optimizer_parameters(schema.optimizer)
    return (schema.dim, kind, *sorted(options.items()))


class RowMatrix:
    """The rows of several tables, and how a step changes them.

    On the host the arithmetic is that of a shard, bit for bit; on another device torch's operations do it.

    Args:
        schema: of one of the tables; all have its width and its optimizer.
        names: the names of the tables within the namespace.
        rows: the number of rows of each.
        device: where the rows are.

    Attributes:
        names: as given.
        firsts: the first row of each table.
        dim: the number of columns.
        weights: (rows, dim) float32.
        state: (rows, floats of state) float32.
        update_counts: (rows) int32.
    """

    def __init__(self, schema: TableSchema, names: Sequence[str], rows: Sequence[int], device: torch.device) -> None:
        self.names, self.dim, self.device = list(names), schema.dim, device
        self.firsts = list(accumulate(rows[:-1], initial=0))
        self._native = native_rows(schema)
        self._kind, self._parameters = optimizer_parameters(schema.optimizer)
        total = sum(rows)
        self.weights = torch.empty(total, schema.dim, device=device)
        self.state = torch.empty(total, self._native.state_floats, device=device)
        self.update_counts = torch.zeros(total, dtype=torch.int32, device=device)

    def rows_of(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the numbers in the matrix, (n) int64, of rows that are numbered within their tables.

        Args:
            parts: the rows of each table.
        """
        return torch.cat([part + first for part, first in zip(parts, self.firsts, strict=True)])

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
