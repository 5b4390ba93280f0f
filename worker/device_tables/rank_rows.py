"""One rank's rows of a table on devices: a range of a matrix, with weights, optimizer state and update counts."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...proto.schema import TableSchema
from .row_matrix import RowMatrix, native_rows
from .share import Share

_FILL_ROWS = 65536  # rows that are written at once at the start


class RankRows:
    """The rows of one table that one rank has.

    Args:
        schema: the schema of the table, with its id.
        share: the division of its keys.
        rank: this rank.
        matrix: has the rows, whose table of this name is not filled yet.
        zeros: the key whose first row is zeros, as a padding row is; None: there is none.

    Attributes:
        schema, share, rank, matrix: as given.
        place: of the table among those of the matrix.
        first: the first row of the table in the matrix.
        weights: (rows, dim) float32, a view of the matrix, as are the others.
        state: (rows, floats of state) float32.
        update_counts: (rows) int32.
    """

    def __init__(
        self, schema: TableSchema, share: Share, rank: int, matrix: RowMatrix, *, zeros: int | None = None
    ) -> None:
        self.schema, self.share, self.rank, self.matrix = schema, share, rank, matrix
        self._native = native_rows(schema)
        rows = share.size(rank)
        self.place = matrix.names.index(schema.name)
        self.first = matrix.firsts[self.place]
        mine = slice(self.first, self.first + rows)
        self.weights, self.state = matrix.weights[mine], matrix.state[mine]
        self.update_counts = matrix.update_counts[mine]
        keys = share.keys_of(rank).numpy().astype(np.uint64)
        for begin in range(0, rows, _FILL_ROWS):
            part = keys[begin : begin + _FILL_ROWS]
            end = begin + len(part)
            initial = self._native.initial(part)
            self.weights[begin:end] = torch.from_numpy(initial).to(matrix.device)
            self.state[begin:end] = torch.from_numpy(self._native.initial_state(initial)).to(matrix.device)
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
        rows = self.share.rows(keys[is_mine]).to(self.matrix.device)
        self.weights.index_copy_(0, rows, weights[is_mine].to(self.matrix.device))
