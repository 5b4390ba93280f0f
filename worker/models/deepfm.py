"""DeepFM: Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction" (2017)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from .hashed_embeddings import HashedEmbeddings
from .mlp import mlp


class DeepFM(nn.Module):
    """Sum of a linear part, pairwise interactions (a factorization machine) and an MLP, on shared embeddings.

    One lookup a column brings both parts of a field: column 0 of a row is its linear weight, the rest its factors. A
    number's field is a learned vector times its value.

    Args:
        n_dense: numeric inputs; may be 0.
        rows: column name -> rows of its table; a key's row is ``key % rows``.
        dim: factors of a field; a row is ``dim + 1`` wide.
        hidden: hidden widths of the MLP.
        dropout: in the MLP.
        init_scale, sparse: as :class:`HashedEmbeddings` takes them.
    """

    def __init__(
        self,
        n_dense: int,
        rows: Mapping[str, int],
        *,
        dim: int = 16,
        hidden: Sequence[int] = (64, 64),
        dropout: float = 0.0,
        init_scale: float = 0.01,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.embeddings = HashedEmbeddings(rows, dim + 1, init_scale=init_scale, sparse=sparse)
        self.dense_fields = nn.Parameter(torch.empty(n_dense, dim + 1).uniform_(-init_scale, init_scale))
        self.deep = mlp([n_dense + len(rows) * dim, *hidden, 1], dropout)

    def forward(self, dense: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """dense: (B, n_dense) float32, keys: (B, n_sparse) int64 -> (B) float32 logits."""
        looked_up = self.embeddings(keys)
        fields = torch.cat([dense[:, :, None] * self.dense_fields, looked_up], dim=1)
        linear, factors = fields[:, :, 0].sum(dim=1), fields[:, :, 1:]
        pairwise = 0.5 * (factors.sum(dim=1).square() - factors.square().sum(dim=1)).sum(dim=1)  # Rendle 2010, (5)
        deep = self.deep(torch.cat([dense, looked_up[:, :, 1:].flatten(1)], dim=1)).squeeze(1)
        logits: torch.Tensor = linear + pairwise + deep
        return logits
