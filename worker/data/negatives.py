"""Down-sampling of negatives: which samples of an epoch are left out, as a pure function of (seed, epoch, position)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_WEYL = 0x9E3779B97F4A7C15
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


@dataclass(frozen=True)
class NegativeSampling:
    """Keeps a share of the negatives.

    Attributes:
        keep: the share w of negatives that are kept, in (0, 1].
        seed: the seed of the choice.
    """

    keep: float
    seed: int

    def chosen(
        self, labels: npt.NDArray[np.float32], positions: npt.NDArray[np.int64], epoch: int
    ) -> npt.NDArray[np.bool_]:
        """Returns which samples are kept, (n): all positives, and each negative with the probability ``keep``.

        Args:
            labels: the labels, (n); a sample whose label is 0 is a negative.
            positions: the positions of the samples in the order of the epoch, (n).
            epoch: the number of the epoch.
        """
        kept: npt.NDArray[np.bool_] = (labels != 0) | (uniform(positions, (self.seed, epoch)) < self.keep)
        return kept


def uniform(counters: npt.NDArray[np.int64], stream: Sequence[int]) -> npt.NDArray[np.float64]:
    """Returns a number in [0, 1) for each counter, by splitmix64 (Steele et al. 2014).

    Args:
        counters: the counters, of any shape.
        stream: the numbers that name a stream, such as a seed and an epoch; streams are independent of each other.
    """
    first = np.random.SeedSequence(stream).generate_state(1, np.uint64)[0]
    with np.errstate(over="ignore"):
        value = counters.astype(np.uint64) * np.uint64(_WEYL) + first
        for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
            value = (value ^ (value >> np.uint64(shift))) * multiplier
        value ^= value >> np.uint64(31)
    numbers: npt.NDArray[np.float64] = (value >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers
