"""The DeepFM model: Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction" (2017)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from .hashed_embeddings import HashedEmbeddings
from .mlp import mlp


def factorization_machine(fields: torch.Tensor) -> torch.Tensor:
    """Returns the sum of fields' linear weights and of inner products of all pairs of fields, (B).

    The products are computed without pairs, as in Rendle, "Factorization Machines" (ICDM 2010), lemma 3.1.

    Args:
        fields: the linear weight and the factors of each field, (B, n, 1 + dim).
    """
    linear, factors = fields[:, :, 0].sum(dim=1), fields[:, :, 1:]
    pairwise = 0.5 * (factors.sum(dim=1).square() - factors.square().sum(dim=1)).sum(dim=1)
    return linear + pairwise


class DeepFM(nn.Module):
    """A model that sums a linear part, pairwise interactions (a factorization machine) and an MLP.

    The three parts share their embeddings. One lookup for each column returns both parts of a field: column 0 of a row
    is its linear weight, and the others are its factors. The field of a number is a learned vector times the number.

    Args:
        n_dense: the number of numeric inputs; may be 0.
        rows: the number of rows of each column's table; a key's row is ``key % rows``.
        dim: the number of factors of a field; a row has ``dim + 1`` columns.
        hidden: the hidden widths of the MLP.
        dropout: the share of units of the MLP that are dropped while training.
        init_scale: initial weights are uniform in [-init_scale, init_scale).
        sparse: whether local tables produce sparse gradients.
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
        """Returns the logits of samples, (B) float32.

        Args:
            dense: the numeric inputs, (B, n_dense) float32.
            keys: the keys, (B, n_sparse) int64, not negative.
        """
        looked_up = self.embeddings(keys)
        fields = torch.cat([dense[:, :, None] * self.dense_fields, looked_up], dim=1)
        deep = self.deep(torch.cat([dense, looked_up[:, :, 1:].flatten(1)], dim=1)).squeeze(1)
        logits: torch.Tensor = factorization_machine(fields) + deep
        return logits
