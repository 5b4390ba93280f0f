"""The DLRM model: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems"
(2019).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from .feature_checks import check_features
from .feature_embeddings import FeatureEmbeddings
from .jagged import Feature
from .mlp import mlp


class DLRM(nn.Module):
    """A model of two MLPs with inner products of embeddings between them.

    The bottom MLP reads the numbers. Inner products are taken of all pairs among its output and the embeddings. The top
    MLP reads the products and the bottom MLP's output. Without numbers there is no bottom MLP.

    Args:
        rows: the number of rows of each table, by the feature that it is named after.
        numbers, shared, pools, init_scale, sparse: as in ``FeatureEmbeddings``.
        dim: the width of embeddings and of the bottom MLP's output.
        bottom: the hidden widths of the bottom MLP.
        top: the hidden widths of the top MLP.
        dropout: the share of units of both MLPs that are dropped while training.

    Raises:
        ValueError: an argument does not fit; the text names it and what is allowed.
    """

    def __init__(
        self,
        rows: Mapping[str, int],
        *,
        numbers: Sequence[str] = (),
        shared: Mapping[str, str] | None = None,
        pools: Mapping[str, str] | None = None,
        dim: int = 16,
        bottom: Sequence[int] = (64,),
        top: Sequence[int] = (64, 64),
        dropout: float = 0.0,
        init_scale: float = 0.01,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.embeddings = FeatureEmbeddings(
            rows, dim, numbers=numbers, shared=shared, pools=pools, init_scale=init_scale, sparse=sparse
        )
        vectors = len(self.embeddings.names) + (len(numbers) > 0)
        if vectors < 2:
            raise ValueError(f"rows={dict(rows)}, numbers={list(numbers)}: allowed: two vectors or more, to multiply")
        self.bottom = mlp([len(numbers), *bottom, dim], dropout, activate_last=True) if numbers else None
        pairs = torch.triu_indices(vectors, vectors, offset=1)
        self.register_buffer("pairs", pairs, persistent=False)
        self.pairs: Tensor
        self.top = mlp([pairs.shape[1] + (dim if numbers else 0), *top, 1], dropout)

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the features that forward takes; a job checks them before its workers start."""
        return self.embeddings.features

    def forward(self, **tensors: Feature) -> Tensor:
        """Returns the logits of samples, (B) float32, for the features by name.

        Raises:
            ValueError: a feature is missing, not read or of another kind.
        """
        check_features(tensors, self.embeddings.features)
        vectors, inputs = self.embeddings(tensors), []
        if self.bottom is not None:
            below = self.bottom(self.embeddings.stacked_numbers(tensors))
            vectors = torch.cat([below[:, None], vectors], dim=1)
            inputs.append(below)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        inputs.append(products[:, self.pairs[0], self.pairs[1]])
        logits: Tensor = self.top(torch.cat(inputs, dim=1)).squeeze(1)
        return logits
