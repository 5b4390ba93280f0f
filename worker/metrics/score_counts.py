"""Counts of positives and negatives by score, for an AUC of any number of samples in bounded memory.

A sample counts as its weight. The AUC of weighted samples is the probability that a positive has a higher score than a
negative, when both are drawn in proportion to their weights; with integer weights it is that of so many equal samples.

A bin is a range of scores that share their leading bits. Scores are float32, whose bits in order of the numbers are a
32-bit code. While at most ``most_bins`` codes were seen, each has a bin of its own, and the AUC is exact. Beyond, the
lowest bit of all codes is dropped until the bins fit, so that between half of ``most_bins`` and all of them are in use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MOST_BINS = 1 << 21
_PENDING = 1 << 19  # samples that wait to be counted together
_SIGN = np.uint32(1 << 31)


@dataclass(frozen=True)
class Auc:
    """An AUC and the bound of its error.

    Attributes:
        value: the area under the ROC curve, in which ties count half; NaN when a class is absent or a score is NaN.
        error: the exact AUC is within this of the value: half of the pairs of a positive and a negative in one bin of
            several scores, by all pairs; 0 while each score has a bin.
    """

    value: float
    error: float


class ScoreCounts:
    """Counts of positives and negatives by score.

    Args:
        most_bins: the most bins; memory is 20 bytes for each.
    """

    def __init__(self, most_bins: int = MOST_BINS) -> None:
        self._most = most_bins
        self._shift = 0
        self._codes = np.empty(0, np.uint32)
        self._counts = np.empty((0, 2), np.float64)  # of negatives and positives; whole numbers are exact
        self._pending: list[tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_], npt.NDArray[np.float64]]] = []
        self._waiting = 0
        self._has_nan = False

    def add(
        self,
        scores: npt.NDArray[np.float32],
        labels: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Counts samples.

        Args:
            scores: the scores, (n); only their order matters.
            labels: the labels, (n); above 0.5 is positive.
            weights: the weights, (n), at least 0; None: 1.
        """
        values = np.ascontiguousarray(scores, dtype=np.float32)
        self._has_nan |= bool(np.isnan(values).any())
        counts = np.ones(len(values)) if weights is None else np.asarray(weights, np.float64)
        self._pending.append((_codes_of(values), np.asarray(labels) > 0.5, counts))
        self._waiting += len(values)
        if self._waiting >= _PENDING:
            self._count()

    def _count(self) -> None:
        if not self._pending:
            return
        codes, positive, counts = (np.concatenate(each) for each in zip(*self._pending, strict=True))
        self._pending, self._waiting = [], 0
        by_class = np.stack([np.where(positive, 0.0, counts), np.where(positive, counts, 0.0)], axis=1)
        self._merge(codes >> np.uint32(self._shift), by_class)

    def _merge(self, codes: npt.NDArray[np.uint32], counts: npt.NDArray[np.float64]) -> None:
        """Adds counts by code, of this shift."""
        all_codes = np.concatenate([self._codes, codes])
        order = np.argsort(all_codes, kind="stable")
        self._codes, self._counts = _summed(all_codes[order], np.concatenate([self._counts, counts])[order])
        while len(self._codes) > self._most:
            self._coarsen(self._shift + 1)

    def _coarsen(self, shift: int) -> None:
        self._codes, self._counts = _summed(self._codes >> np.uint32(shift - self._shift), self._counts)
        self._shift = shift

    def state_dict(self) -> dict[str, Any]:
        """Returns the counts as numbers and arrays, at most 20 bytes for each of the bins."""
        self._count()
        return {"shift": self._shift, "codes": self._codes, "counts": self._counts, "has_nan": self._has_nan}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the counts of a result of :meth:`state_dict`."""
        self._pending, self._waiting = [], 0
        self._shift, self._has_nan = state["shift"], state["has_nan"]
        self._codes, self._counts = np.array(state["codes"], np.uint32), np.array(state["counts"], np.float64)

    @staticmethod
    def merged(parts: Sequence[ScoreCounts]) -> ScoreCounts:
        """Returns the counts of several together; there is at least one, and they may be changed."""
        for part in parts:
            part._count()
        shift = max(part._shift for part in parts)
        whole = ScoreCounts(parts[0]._most)
        whole._shift = shift
        for part in parts:
            part._coarsen(max(shift, part._shift))
            if whole._shift > part._shift:  # the merge of earlier parts made it coarser
                part._coarsen(whole._shift)
            whole._has_nan |= part._has_nan
            whole._merge(part._codes, part._counts)
        return whole

    @property
    def bins(self) -> int:
        """The number of bins in use."""
        self._count()
        return len(self._codes)

    def auc(self) -> Auc:
        """Returns the AUC of the samples so far, by ranks (Mann & Whitney 1947)."""
        self._count()
        negatives, positives = self._counts[:, 0], self._counts[:, 1]
        pairs = float(negatives.sum()) * float(positives.sum())
        if pairs == 0 or self._has_nan:
            return Auc(float("nan"), 0.0)
        below = np.cumsum(negatives) - negatives
        ties = float((positives * negatives).sum()) / 2
        value = (float((positives * below).sum()) + ties) / pairs
        return Auc(value, 0.0 if self._shift == 0 else ties / pairs)


def _codes_of(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """Returns the bits of numbers in the order of the numbers; -0.0 has the code of 0.0."""
    bits = (values + np.float32(0.0)).view(np.uint32)
    codes: npt.NDArray[np.uint32] = np.where(bits & _SIGN, ~bits, bits | _SIGN)
    return codes


def _summed(
    codes: npt.NDArray[np.uint32], counts: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float64]]:
    """Returns the distinct codes of a sorted array, and the sums of the counts of each."""
    if not len(codes):
        return codes, counts
    firsts = np.flatnonzero(np.concatenate([[True], codes[1:] != codes[:-1]]))
    return codes[firsts], np.add.reduceat(counts, firsts, axis=0)
