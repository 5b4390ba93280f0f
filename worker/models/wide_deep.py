"""The Wide & Deep model: Cheng et al., "Wide & Deep Learning for Recommender Systems" (DLRS 2016)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from .feature_checks import check_features
from .feature_embeddings import FeatureEmbeddings
from .jagged import Feature
from .mlp import mlp


class WideDeep(nn.Module):
    """A model that sums a linear part, which memorises single keys and crosses, and an MLP, which generalises.

    The logit is ``w_wide [x, phi(x)] + w_deep a + b`` (equation 3): x and phi(x) are the keys of the wide features and
    of crosses of features, each with a weight of its own; a is the last layer of an MLP over the embeddings and
    numbers. A cross is a feature like any other, such as one of ``kind: cross`` of a job. The weights of the wide part
    are tables of one column, ``wide.tables.*``, so that they may have an optimizer of their own, such as FTRL.

    Args:
        rows: the number of rows of each table of the deep part, by the feature that it is named after.
        wide: the number of rows of each table of the wide part, by its feature. A feature may be in both parts.
        numbers, shared, init_scale, sparse: as in ``FeatureEmbeddings``, for the deep part.
        pools: how a list is pooled in the deep part, by feature. The wide part sums the weights of a list's keys.
        dim: the width of an embedding of the deep part.
        hidden: the hidden widths of the MLP.
        dropout: the share of units of the MLP that are dropped while training.

    Raises:
        ValueError: an argument does not fit; the text names it and what is allowed.
    """

    def __init__(
        self,
        rows: Mapping[str, int],
        wide: Mapping[str, int],
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
        deep = {*rows, *(shared or {})}
        deep_pools = {name: pool for name, pool in (pools or {}).items() if name in deep or name not in wide}
        self.embeddings = FeatureEmbeddings(
            rows, dim, numbers=numbers, shared=shared, pools=deep_pools, init_scale=init_scale, sparse=sparse
        )
        if not wide:
            raise ValueError("wide={} is not allowed; allowed: the rows of at least one feature")
        try:
            sums = {name: "sum" for name in pools or {} if name in wide}
            self.wide = FeatureEmbeddings(wide, 1, pools=sums, init_scale=init_scale, sparse=sparse)
        except ValueError as error:
            raise ValueError(f"wide: {error}") from None
        self.deep = mlp([self.embeddings.width(), *hidden, 1], dropout)  # its last layer has the b of the equation

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the features that forward takes; a job checks them before its workers start."""
        return tuple(dict.fromkeys((*self.embeddings.features, *self.wide.features)))

    def forward(self, **tensors: Feature) -> Tensor:
        """Returns the logits of samples, (B) float32.

        Args:
            tensors: the features of both parts by name.

        Raises:
            ValueError: a feature is missing, not read or of another kind.
        """
        check_features(tensors, self.reads)
        logits: Tensor = self.wide.flat(tensors).sum(dim=1) + self.deep(self.embeddings.flat(tensors)).squeeze(1)
        return logits
