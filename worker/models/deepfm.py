"""The DeepFM model: Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction" (2017)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from .feature_checks import check_features
from .feature_embeddings import FeatureEmbeddings
from .jagged import Feature
from .mlp import mlp


def factorization_machine(fields: Tensor) -> Tensor:
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

    The three parts share their embeddings. Column 0 of a row is its linear weight, and the others are its factors. The
    field of a number is a learned vector times the number.

    Args:
        rows: the number of rows of each table, by the feature that it is named after.
        numbers, shared, pools, init_scale, sparse: as in ``FeatureEmbeddings``.
        dim: the number of factors of a field; a row has ``dim + 1`` columns.
        hidden: the hidden widths of the MLP.
        dropout: the share of units of the MLP that are dropped while training.

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
        hidden: Sequence[int] = (64, 64),
        dropout: float = 0.0,
        init_scale: float = 0.01,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        if not rows:
            raise ValueError("rows={} is not allowed; allowed: the rows of at least one feature")
        self.embeddings = FeatureEmbeddings(
            rows, dim + 1, numbers=numbers, shared=shared, pools=pools, init_scale=init_scale, sparse=sparse
        )
        self.number_fields = nn.Parameter(torch.empty(len(numbers), dim + 1).uniform_(-init_scale, init_scale))
        self.deep = mlp([len(numbers) + len(self.embeddings.names) * dim, *hidden, 1], dropout)

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
        fields = self.embeddings(tensors)
        inputs = [fields[:, :, 1:].flatten(1)]
        if self.embeddings.numbers:
            numbers = self.embeddings.stacked_numbers(tensors)
            fields = torch.cat([fields, numbers[:, :, None] * self.number_fields], dim=1)
            inputs.insert(0, numbers)
        logits: Tensor = factorization_machine(fields) + self.deep(torch.cat(inputs, dim=1)).squeeze(1)
        return logits
