"""The DIN model: Zhou et al., "Deep Interest Network for Click-Through Rate Prediction" (KDD 2018)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from .feature_checks import check_features
from .feature_embeddings import FeatureEmbeddings
from .jagged import Feature, aligned, sample_of_values, segment_softmax, segment_sum
from .mlp import mlp


class DIN(nn.Module):
    """A model that weighs each item of a user's history by how much it says about the target item.

    The user's interest in the target A is ``v_U(A) = sum over j of a(e_j, v_A) e_j`` (equation 3), where e_j are the
    embeddings of the history, v_A is that of the target, and a is an MLP, the activation unit. It reads
    ``[v_A, e_j, v_A - e_j, v_A * e_j]``. Its weights are not normalised, so that a strong interest gives a long vector
    (section 4.3). The interest, all other embeddings and the numbers go through an MLP with PReLU. Where an item has
    several features, such as its id and its category, e_j and v_A are their embeddings side by side.

    The lists are not padded: the scores are computed for the items that there are. An empty history gives zeros.

    Args:
        rows: the number of rows of each table, by the feature that it is named after.
        history: the features of the history, each with the feature of the target whose table it reads, such as
            ``{"clicked_items": "item", "clicked_categories": "category"}``; at least one. All have a list of the same
            length in a sample.
        numbers, shared, pools, init_scale, sparse: as in ``FeatureEmbeddings``; ``history`` is in neither of them.
        dim: the width of an embedding.
        hidden: the hidden widths of the MLP.
        attention: the hidden widths of the activation unit.
        softmax: whether the weights of a history are normalised by softmax.
        dropout: the share of units of the MLP that are dropped while training.

    Raises:
        ValueError: an argument does not fit; the text names it and what is allowed.
    """

    def __init__(
        self,
        rows: Mapping[str, int],
        history: Mapping[str, str],
        *,
        numbers: Sequence[str] = (),
        shared: Mapping[str, str] | None = None,
        pools: Mapping[str, str] | None = None,
        dim: int = 16,
        hidden: Sequence[int] = (200, 80),
        attention: Sequence[int] = (80, 40),
        softmax: bool = False,
        dropout: float = 0.0,
        init_scale: float = 0.01,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        if not history:
            raise ValueError("history={} is not allowed; allowed: at least one feature of the history")
        targets = list(history.values())
        for name, target in history.items():
            if name in (pools or {}) or target in (pools or {}):
                raise ValueError(f"pools: history[{name!r}]={target!r} is not pooled; allowed: other features")
            if targets.count(target) > 1:
                raise ValueError(f"history[{name!r}]={target!r} is given twice; allowed: a target for each feature")
        self.embeddings = FeatureEmbeddings(
            rows,
            dim,
            numbers=numbers,
            shared={**(shared or {}), **history},
            pools=pools,
            init_scale=init_scale,
            sparse=sparse,
        )
        self.history, self.softmax = dict(history), softmax
        self.profile = [*targets, *(name for name in self.embeddings.features if name not in {*history, *targets})]
        self.item = len(history) * dim
        self.attention = mlp([4 * self.item, *attention, 1], activation=nn.PReLU)
        self.deep = mlp([self.item + self.embeddings.width(self.profile), *hidden, 1], dropout, activation=nn.PReLU)

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the features that forward takes; a job checks them before its workers start."""
        return self.embeddings.features

    def forward(self, **tensors: Feature) -> Tensor:
        """Returns the logits of samples, (B) float32.

        Args:
            tensors: the features by name: lists of the history, numbers, keys of the target and others.

        Raises:
            ValueError: a feature is missing, not read or of another kind, or lists of the history differ in length.
        """
        check_features(tensors, self.embeddings.features)
        items, samples, count = self._items(tensors)
        profile = self.embeddings.flat(tensors, self.profile)  # the target comes first
        target = profile[:, : self.item][samples]
        weights = self.attention(torch.cat([target, items, target - items, target * items], dim=1)).squeeze(1)
        if self.softmax:
            weights = segment_softmax(weights, samples, count)
        interest = segment_sum(weights[:, None] * items, samples, count)
        logits: Tensor = self.deep(torch.cat([interest, profile], dim=1)).squeeze(1)
        return logits

    def _items(self, tensors: Mapping[str, Feature]) -> tuple[Tensor, Tensor, int]:
        """Returns the items of all histories, (m, width), the sample of each, (m) int64, and the number of samples."""
        (first, *others) = self.history
        rows, offsets = self.embeddings.sequence(tensors, first)
        samples = sample_of_values(rows, offsets)
        places = torch.arange(rows.shape[0], device=rows.device) - offsets[samples]
        parts = [rows]
        for name in others:
            values, lengths = self.embeddings.sequence(tensors, name)
            if not torch.compiler.is_compiling() and not torch.equal(lengths, offsets):
                raise ValueError(
                    f"features: lists of {name!r} and {first!r} differ in length; allowed: the same length"
                )
            parts.append(aligned(values, lengths, samples, places))
        return torch.cat(parts, dim=1), samples, offsets.shape[0] - 1
