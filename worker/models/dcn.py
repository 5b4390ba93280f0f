"""The DCN-v2 model: Wang et al., "DCN V2: Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to
Rank Systems" (WWW 2021).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from .cross_layers import MatrixCross, MixtureCross, VectorCross
from .feature_checks import check_choice, check_features
from .feature_embeddings import FeatureEmbeddings
from .jagged import Feature
from .mlp import mlp


class DCN(nn.Module):
    """A model whose cross layers multiply features explicitly: after l layers it has products of up to l + 1 of them.

    The input x0 has all embeddings and numbers side by side. "stacked" puts an MLP behind the cross layers; "parallel"
    puts it beside them (figure 1). The last layer is linear.

    Args:
        rows: the number of rows of each table, by the feature that it is named after.
        numbers, shared, pools, init_scale, sparse: as in ``FeatureEmbeddings``.
        dim: the width of an embedding.
        cross: the kind of the cross layers: "matrix" of DCN-v2, "vector" of DCN, or "mixture" of low rank, which needs
            ``2 experts rank width`` weights in place of ``width ** 2``.
        layers: the number of cross layers.
        rank: the rank of an expert of "mixture", 32 by default; the other kinds have none.
        experts: the number of experts of "mixture", 4 by default; the other kinds have none.
        structure: "stacked" or "parallel".
        hidden: the widths of the MLP.
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
        cross: str = "matrix",
        layers: int = 3,
        rank: int | None = None,
        experts: int | None = None,
        structure: str = "stacked",
        hidden: Sequence[int] = (64, 64),
        dropout: float = 0.0,
        init_scale: float = 0.01,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        check_choice("structure", structure, ("stacked", "parallel"))
        self.embeddings = FeatureEmbeddings(
            rows, dim, numbers=numbers, shared=shared, pools=pools, init_scale=init_scale, sparse=sparse
        )
        width = self.embeddings.width()
        self.crosses = nn.ModuleList(_cross(cross, width, rank, experts) for _ in range(layers))
        self.is_stacked = structure == "stacked"
        self.deep = mlp([width, *hidden], dropout, activate_last=True)
        behind = hidden[-1] if hidden else width
        self.last = nn.Linear(behind if self.is_stacked else width + behind, 1)

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
        x0 = x = self.embeddings.flat(tensors)
        for cross in self.crosses:
            x = cross(x0, x)
        out = self.deep(x) if self.is_stacked else torch.cat([x, self.deep(x0)], dim=1)
        logits: Tensor = self.last(out).squeeze(1)
        return logits


def _cross(kind: str, width: int, rank: int | None, experts: int | None) -> nn.Module:
    check_choice("cross", kind, ("matrix", "vector", "mixture"))
    if kind == "mixture":
        return MixtureCross(width, rank or 32, experts or 4)
    if rank is not None or experts is not None:
        raise ValueError(f"rank={rank}, experts={experts}: cross={kind!r} has neither; allowed: cross='mixture'")
    return MatrixCross(width) if kind == "matrix" else VectorCross(width)
