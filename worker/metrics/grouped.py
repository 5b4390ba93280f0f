"""GAUC: the AUC within groups of samples, such as those of one user, averaged by the number of samples.

The formula is that of Zhou et al., "Deep Interest Network for Click-Through Rate Prediction" (KDD 2018), equation 6:
``sum over groups of samples x AUC / sum of samples``. Groups with one class have no AUC and are left out. A sample of
weight w counts as w samples, in the AUC of its group and in the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class GroupSums:
    """What the GAUC of some groups is computed from; sums of different groups may be added.

    Attributes:
        weighted: the sum of samples x AUC over groups with both classes.
        samples: the samples of those groups, or the sum of their weights.
        groups: the number of all groups.
    """

    weighted: float = 0.0
    samples: float = 0.0
    groups: int = 0

    @property
    def gauc(self) -> float:
        """The GAUC; NaN when no group has both classes, or one that has them has a score that is NaN."""
        return self.weighted / self.samples if self.samples else float("nan")


class GroupedScores:
    """Scores, labels and weights with the keys of their groups, 17 bytes a sample, or 21 with weights."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []

    def add(
        self,
        groups: npt.NDArray[np.int64],
        scores: npt.NDArray[np.float32],
        labels: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Keeps samples.

        Args:
            groups: the key of each sample's group, (n).
            scores: the scores, (n).
            labels: the labels, (n); above 0.5 is positive.
            weights: the weights, (n), at least 0; None: 1. Either all samples have some or none has.
        """
        self._parts.append(_Part(groups, scores.astype(np.float32), np.asarray(labels) > 0.5, weights))

    def by_rank(self, world: int) -> list[GroupedScores]:
        """Returns the samples that each of so many ranks shall have, so that a group is on one rank."""
        whole = _joined(self._parts)
        # A key has 63 bits of a hash or a small number; its multiple spreads both (Knuth, vol. 3, 6.4).
        owners = ((whole.groups.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(33)) % np.uint64(world)
        parts = []
        for rank in range(world):
            part = GroupedScores()
            part._parts = [whole.take(np.flatnonzero(owners == rank))]
            parts.append(part)
        return parts

    def sums(self, others: Sequence[GroupedScores] = ()) -> GroupSums:
        """Returns the sums over the groups of these samples and of others'."""
        whole = _joined([*self._parts, *(part for other in others for part in other._parts)])
        if not len(whole.groups):
            return GroupSums()
        whole = whole.take(np.lexsort((whole.scores, whole.groups)))
        is_group = np.concatenate([[True], whole.groups[1:] != whole.groups[:-1]])
        begins = np.flatnonzero(is_group)
        runs = np.flatnonzero(is_group | np.concatenate([[True], whole.scores[1:] != whole.scores[:-1]]))
        weights = np.ones(len(is_group)) if whole.weights is None else whole.weights.astype(np.float64)
        positive, negative = np.where(whole.labels, weights, 0.0), np.where(whole.labels, 0.0, weights)
        positives, negatives = np.add.reduceat(positive, begins), np.add.reduceat(negative, begins)
        # Samples of one group with one score are a run; half of the negatives of a positive's run are below it.
        below = np.cumsum(negative) - negative
        group_of_run = np.cumsum(is_group)[runs] - 1
        ties = np.add.reduceat(negative, runs) / 2
        pairs = np.add.reduceat(positive, runs) * (below[runs] - below[begins][group_of_run] + ties)
        both = (positives > 0) & (negatives > 0)
        aucs = np.bincount(group_of_run, pairs, len(begins))[both] / (positives[both] * negatives[both])
        aucs[np.logical_or.reduceat(np.isnan(whole.scores), begins)[both]] = np.nan
        sizes = (positives + negatives)[both]
        return GroupSums(float((aucs * sizes).sum()), float(sizes.sum()), len(begins))


@dataclass(frozen=True)
class _Part:
    groups: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]
    labels: npt.NDArray[np.bool_]
    weights: npt.NDArray[np.float32] | None

    def take(self, places: npt.NDArray[np.int64]) -> _Part:
        weights = None if self.weights is None else self.weights[places]
        return _Part(self.groups[places], self.scores[places], self.labels[places], weights)


def _joined(parts: Sequence[_Part]) -> _Part:
    """Returns the samples of several parts as one; a part without samples says nothing of weights."""
    filled = [part for part in parts if len(part.groups)]
    if not filled:
        return _Part(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.bool_), None)
    weights = [part.weights for part in filled if part.weights is not None]
    return _Part(
        np.concatenate([part.groups for part in filled]),
        np.concatenate([part.scores for part in filled]),
        np.concatenate([part.labels for part in filled]),
        np.concatenate(weights) if weights else None,
    )
