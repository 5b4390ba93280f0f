"""``Jagged``: lists of keys as arrays, one list for each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Jagged:
    """Keys of lists, one list for each row.

    Attributes:
        values: the keys of all lists, one after another, (m) int64.
        offsets: where each list begins in ``values``, and the end of the last one, (n + 1) int64.
        weights: the weight of each key, (m) float32; None: there are none.
    """

    values: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def parts(self) -> tuple[npt.NDArray[Any], ...]:
        """The arrays that there are: (values, offsets), or (values, offsets, weights)."""
        return (self.values, self.offsets) if self.weights is None else (self.values, self.offsets, self.weights)

    @staticmethod
    def none(*, has_weights: bool = False) -> Jagged:
        """Returns the lists of no rows.

        Args:
            has_weights: whether keys have weights.
        """
        empty = np.empty(0, dtype=np.int64)
        return Jagged(empty, np.zeros(1, dtype=np.int64), np.empty(0, np.float32) if has_weights else None)

    def take(self, order: npt.NDArray[np.int64] | slice) -> Jagged:
        """Returns the lists of the rows at some positions.

        Args:
            order: the positions, (k) int64, or a slice without a step. The arrays of a slice are views.
        """
        if isinstance(order, slice):
            first, last, _ = order.indices(len(self))
            offsets = self.offsets[first : max(first, last) + 1]
            mine = slice(int(offsets[0]), int(offsets[-1]))
            weights = None if self.weights is None else self.weights[mine]
            return Jagged(self.values[mine], offsets - offsets[0], weights)
        lengths = np.diff(self.offsets)[order]
        offsets = offsets_of(lengths)
        keys = np.repeat(self.offsets[:-1][order] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Jagged(self.values[keys], offsets, None if self.weights is None else self.weights[keys])

    @staticmethod
    def concatenate(parts: Sequence[Jagged]) -> Jagged:
        """Joins lists of neighbouring rows; there is at least one part."""
        lengths = np.concatenate([np.diff(part.offsets) for part in parts])
        weights = [part.weights for part in parts if part.weights is not None]
        return Jagged(
            np.concatenate([part.values for part in parts]),
            offsets_of(lengths),
            np.concatenate(weights) if weights else None,
        )


def offsets_of(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns where lists begin, and the end of the last one, (n + 1) int64.

    Args:
        lengths: the length of each list, (n) int64.
    """
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
