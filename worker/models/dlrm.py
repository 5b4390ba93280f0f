"""The DLRM model: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems"
(2019).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from .hashed_embeddings import HashedEmbeddings
from .mlp import mlp


class DLRM(nn.Module):
    """A model of two MLPs with inner products of embeddings between them.

    The bottom MLP reads the numbers. Inner products are taken of all pairs among its output and the embeddings. The top
    MLP reads the products and the bottom MLP's output.

    Args:
        n_dense: the number of numeric inputs; with 0 there is no bottom MLP.
        rows: the number of rows of each column's table; a key's row is ``key % rows``.
        dim: the width of embeddings and of the bottom MLP's output.
        bottom: the hidden widths of the bottom MLP.
        top: the hidden widths of the top MLP.
        dropout: the share of units of both MLPs that are dropped while training.
        init_scale: initial weights are uniform in [-init_scale, init_scale).
        sparse: whether local tables produce sparse gradients.
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
        """Returns the logits of samples, (B) float32.

        Args:
            dense: the numeric inputs, (B, n_dense) float32.
            keys: the keys, (B, n_sparse) int64, not negative.
        """
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
