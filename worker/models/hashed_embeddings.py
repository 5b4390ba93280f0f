"""Embeddings of columns whose keys are larger than any table, with one ordinary ``nn.Embedding`` for each column.

A 63-bit key cannot index a local matrix, so the row of a key is ``key % num_embeddings``. The table gets the same ids
whether it is local or distributed. Two keys of a column with the same row share its embedding. In a table of 2**44
rows, which only a parameter server can offer, this practically never happens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


class HashedEmbeddings(nn.Module):
    """Looks up one embedding for the key of each column.

    Args:
        rows: ``num_embeddings`` by column name, in the order of the columns of the input.
        dim: the width of an embedding.
        init_scale: initial weights are uniform in [-init_scale, init_scale).
        sparse: whether local tables produce sparse gradients.
    """

    def __init__(self, rows: Mapping[str, int], dim: int, *, init_scale: float = 0.01, sparse: bool = False) -> None:
        super().__init__()
        self.dim = dim
        self.tables = nn.ModuleDict()
        for name, count in rows.items():
            table = nn.Embedding(count, dim, sparse=sparse)
            nn.init.uniform_(table.weight, -init_scale, init_scale)
            self.tables[name] = table
        self._rows_on_host = torch.tensor(list(rows.values()), dtype=torch.int64)
        self.register_buffer("rows", self._rows_on_host.clone(), persistent=False)
        self.rows: torch.Tensor

    def ids(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the ids that each table looks up: name -> (B) int64. The keys are as ``forward`` takes them."""
        ids = self._ids(keys)
        return {name: ids[:, column] for column, name in enumerate(self.tables)}

    def _ids(self, keys: torch.Tensor) -> torch.Tensor:
        return torch.remainder(keys, self.rows if keys.device == self.rows.device else self._rows_on_host)

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        """Looks up the embedding of every key.

        Args:
            keys: non-negative, (B, n_columns) int64; on the device of the module, or on the host. On the host they
                suit distributed tables, and one copy brings them to the tables that are local.

        Returns:
            (B, n_columns, dim) float32 on the device of the module.
        """
        ids = self._ids(keys)
        there = None
        rows = []
        for column, table in enumerate(self.tables.values()):
            mine = ids[:, column]
            if isinstance(table, nn.Embedding) and mine.device != table.weight.device:
                there = ids.to(table.weight.device) if there is None else there
                mine = there[:, column]
            rows.append(table(mine))
        return torch.stack(rows, dim=1)
