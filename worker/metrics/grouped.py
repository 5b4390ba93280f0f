"""GAUC: the AUC within groups of samples, such as those of one user, averaged by the number of samples.

The formula is that of Zhou et al., "Deep Interest Network for Click-Through Rate Prediction" (KDD 2018), equation 6:
``sum over groups of samples x AUC / sum of samples``. Groups with one class have no AUC and are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class GroupSums:
    """What the GAUC of some groups is computed from; sums of different groups may be added.

    Attributes:
        weighted: the sum of samples x AUC over groups with both classes.
        samples: the samples of those groups.
        groups: the number of all groups.
    """

    weighted: float = 0.0
    samples: int = 0
    groups: int = 0

    @property
    def gauc(self) -> float:
        """The GAUC; NaN when no group has both classes."""
        return self.weighted / self.samples if self.samples else float("nan")


class GroupedScores:
    """Scores and labels with the keys of their groups, 17 bytes a sample."""

    def __init__(self) -> None:
        self._parts: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.bool_]]] = []

    def add(
        self,
        groups: npt.NDArray[np.int64],
        scores: npt.NDArray[np.float32],
        labels: npt.NDArray[np.float32],
    ) -> None:
        """Keeps samples.

        Args:
            groups: the key of each sample's group, (n).
            scores: the scores, (n).
            labels: the labels, (n); above 0.5 is positive.
        """
        self._parts.append((groups, scores.astype(np.float32), np.asarray(labels) > 0.5))

    def by_rank(self, world: int) -> list[GroupedScores]:
        """Returns the samples that each of so many ranks shall have, so that a group is on one rank."""
        groups, scores, labels = self._arrays()
        # A key has 63 bits of a hash or a small number; its multiple spreads both (Knuth, vol. 3, 6.4).
        owners = ((groups.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(33)) % np.uint64(world)
        parts = []
        for rank in range(world):
            mine = owners == rank
            part = GroupedScores()
            part.add(groups[mine], scores[mine], labels[mine].astype(np.float32))
            parts.append(part)
        return parts

    def sums(self, others: list[GroupedScores] | None = None) -> GroupSums:
        """Returns the sums over the groups of these samples and of others'."""
        whole = GroupedScores()
        whole._parts = [*self._parts, *(part for other in others or () for part in other._parts)]
        groups, scores, labels = whole._arrays()
        order = np.lexsort((scores, groups))
        groups, scores, labels = groups[order], scores[order], labels[order]
        if not len(groups):
            return GroupSums()
        begins = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]]))
        sizes = np.diff(np.concatenate([begins, [len(groups)]]))
        ranks = _mean_ranks(begins, sizes, scores)
        positives = np.add.reduceat(labels.astype(np.float64), begins)
        rank_sums = np.add.reduceat(np.where(labels, ranks, 0.0), begins)
        negatives = sizes - positives
        both = (positives > 0) & (negatives > 0)
        aucs = (rank_sums[both] - positives[both] * (positives[both] + 1) / 2) / (positives[both] * negatives[both])
        return GroupSums(float((aucs * sizes[both]).sum()), int(sizes[both].sum()), len(begins))

    def _arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        if not self._parts:
            return np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.bool_)
        groups, scores, labels = zip(*self._parts, strict=True)
        return np.concatenate(groups), np.concatenate(scores), np.concatenate(labels)


def _mean_ranks(
    begins: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], scores: npt.NDArray[np.float32]
) -> npt.NDArray[np.float64]:
    """Returns the rank of each score in its group from 1; equal scores of a group have their mean rank.

    Args:
        begins: where each group begins.
        sizes: the number of samples of each group.
        scores: the scores, sorted within each group.
    """
    is_first = np.concatenate([[True], scores[1:] != scores[:-1]])
    is_first[begins] = True
    firsts = np.flatnonzero(is_first)
    runs = np.diff(np.concatenate([firsts, [len(scores)]]))
    group_begin = np.repeat(begins, sizes)
    means = firsts - group_begin[firsts] + (runs + 1) / 2
    repeated: npt.NDArray[np.float64] = np.repeat(means, runs)
    return repeated
