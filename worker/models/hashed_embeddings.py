"""One ordinary ``nn.Embedding`` a column, for keys that are larger than any table.

A 63-bit key cannot index a local matrix, so a column's row is ``key % num_embeddings``. The same ids reach the table
whether it is local or distributed. Two keys of a column that share a row share its embedding; a table of 2**44 rows,
which only a parameter server can offer, has practically none of these.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


class HashedEmbeddings(nn.Module):
    """Looks up one embedding for each column's key.

    Args:
        rows: column name -> ``num_embeddings``, in the order of the columns of the input.
        dim: width of an embedding.
        init_scale: initial weights are uniform in [-init_scale, init_scale).
        sparse: whether local tables make sparse gradients.
    """

    def __init__(self, rows: Mapping[str, int], dim: int, *, init_scale: float = 0.01, sparse: bool = False) -> None:
        super().__init__()
        self.dim = dim
        self.tables = nn.ModuleDict()
        for name, count in rows.items():
            table = nn.Embedding(count, dim, sparse=sparse)
            nn.init.uniform_(table.weight, -init_scale, init_scale)
            self.tables[name] = table
        self.register_buffer("rows", torch.tensor(list(rows.values()), dtype=torch.int64), persistent=False)
        self.rows: torch.Tensor

    def ids(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        """What each table will look up: name -> (B) int64; keys as ``forward`` takes them."""
        ids = torch.remainder(keys, self.rows.to(keys.device))
        return {name: ids[:, column] for column, name in enumerate(self.tables)}

    def forward(self, keys: torch.Tensor) -> torch.Tensor:
        """(B, n_columns) int64 keys, non-negative -> (B, n_columns, dim) float32."""
        ids = torch.remainder(keys, self.rows)
        return torch.stack([table(ids[:, column]) for column, table in enumerate(self.tables.values())], dim=1)
