"""The AutoInt model: Song et al., "AutoInt: Automatic Feature Interaction Learning via Self-Attentive Neural Networks"
(CIKM 2019).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from .feature_checks import check_features
from .feature_embeddings import FeatureEmbeddings
from .jagged import Feature
from .mlp import mlp


class FieldAttention(nn.Module):
    """An interacting layer: multi-head self-attention among the fields of a sample (section 4.4).

    In a head, field m attends to field k with the weight ``softmax over k of <W_query e_m, W_key e_k>``, and gets the
    sum of these weights times ``W_value e_k``. With the heads side by side in a vector a, the output is
    ``relu(a + W_residual e_m)``.

    Args:
        width_in: the width of a field.
        heads: the number of heads.
        head: the width of a head.
    """

    def __init__(self, width_in: int, heads: int, head: int) -> None:
        super().__init__()
        self.heads, self.head = heads, head
        self.query, self.key, self.value, self.residual = (
            nn.Linear(width_in, heads * head, bias=False) for _ in range(4)
        )

    def forward(self, fields: Tensor) -> Tensor:
        """Returns fields, (B, n, heads * head), for ``fields``, (B, n, width_in)."""
        query, key, value = (
            layer(fields).unflatten(2, (self.heads, self.head)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        weights = torch.softmax(query @ key.transpose(2, 3), dim=3)
        attended = (weights @ value).transpose(1, 2).flatten(2)
        return torch.relu(attended + self.residual(fields))


class AutoInt(nn.Module):
    """A model that finds combinations of features by self-attention among their embeddings.

    A key's field is its embedding, and a number's field is a learned vector times the number (section 4.3). Fields
    go through interacting layers, and a linear layer over all of them gives the logit (section 4.5). With ``hidden``,
    the logit of an MLP over the fields is added, which the paper calls AutoInt+.

    Args:
        rows: the number of rows of each table, by the feature that it is named after.
        numbers, shared, pools, init_scale, sparse: as in ``FeatureEmbeddings``.
        dim: the width of an embedding.
        layers: the number of interacting layers.
        heads: the number of heads of a layer.
        head: the width of a head.
        hidden: the hidden widths of the MLP; () for none.
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
        layers: int = 3,
        heads: int = 2,
        head: int = 16,
        hidden: Sequence[int] = (),
        dropout: float = 0.0,
        init_scale: float = 0.01,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        self.embeddings = FeatureEmbeddings(
            rows, dim, numbers=numbers, shared=shared, pools=pools, init_scale=init_scale, sparse=sparse
        )
        fields, widths = len(self.embeddings.features), [dim, *[heads * head] * layers]
        self.number_fields = nn.Parameter(torch.empty(len(numbers), dim).uniform_(-init_scale, init_scale))
        self.attention = nn.Sequential(*(FieldAttention(width, heads, head) for width in widths[:-1]))
        self.last = nn.Linear(fields * widths[-1], 1)
        self.deep = mlp([fields * dim, *hidden, 1], dropout) if hidden else None

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
        parts = [self.embeddings(tensors)] if self.embeddings.names else []
        if self.embeddings.numbers:
            parts.append(self.embeddings.stacked_numbers(tensors)[:, :, None] * self.number_fields)
        fields = torch.cat(parts, dim=1)
        logits: Tensor = self.last(self.attention(fields).flatten(1)).squeeze(1)
        return logits if self.deep is None else logits + self.deep(fields.flatten(1)).squeeze(1)
