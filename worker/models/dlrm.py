"""DLRM: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems" (2019)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from .hashed_embeddings import HashedEmbeddings
from .mlp import mlp


class DLRM(nn.Module):
    """Bottom MLP over numbers, inner products of all pairs of embeddings and its output, top MLP over these.

    Args:
        n_dense: numeric inputs; 0 leaves the bottom MLP out.
        rows: column name -> rows of its table; a key's row is ``key % rows``.
        dim: width of embeddings and of the bottom MLP's output.
        bottom, top: hidden widths.
        dropout: in both MLPs.
        init_scale, sparse: as :class:`HashedEmbeddings` takes them.
    """

    def __init__(
        self,
        n_dense: int,
        rows: Mapping[str, int],
        *,
        dim: int = 16,
        bottom: Sequence[int] = (64,),
        top: Sequence[int] = (64, 64),
        dropout: float = 0.0,
        init_scale: float = 0.01,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.embeddings = HashedEmbeddings(rows, dim, init_scale=init_scale, sparse=sparse)
        self.bottom = mlp([n_dense, *bottom, dim], dropout, activate_last=True) if n_dense else None
        vectors = len(rows) + (n_dense > 0)
        pairs = torch.triu_indices(vectors, vectors, offset=1)
        self.register_buffer("pairs", pairs, persistent=False)
        self.pairs: torch.Tensor
        self.top = mlp([pairs.shape[1] + (dim if n_dense else 0), *top, 1], dropout)

    def forward(self, dense: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """dense: (B, n_dense) float32, keys: (B, n_sparse) int64 -> (B) float32 logits."""
        vectors = self.embeddings(keys)
        features = []
        if self.bottom is not None:
            below = self.bottom(dense)
            vectors = torch.cat([below[:, None], vectors], dim=1)
            features.append(below)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        features.append(products[:, self.pairs[0], self.pairs[1]])
        logits: torch.Tensor = self.top(torch.cat(features, dim=1)).squeeze(1)
        return logits
