"""Decoded samples, whatever the format of their file, and how parts of them are joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...proto.features.jagged import Jagged


@dataclass(frozen=True)
class Lines:
    """Decoded samples, in file order.

    Attributes:
        numeric: the numbers before they are scaled, (n, numbers) float64; NaN where a value is missing.
        keys: the keys, (n, keys) int64.
        labels: the labels, (n) float32; where the job names several, (n, labels).
        lists: the keys of each feature that gives lists.
        weights: the weight of each sample, (n) float32; None: the job names none.
        groups: a key of the group of each sample, (n) int64; None: the job names none.
        times: the time of each sample, microseconds since 1970 in UTC, (n) int64; None: the job names none.
    """

    numeric: npt.NDArray[np.float64]
    keys: npt.NDArray[np.int64]
    labels: npt.NDArray[np.float32]
    lists: tuple[Jagged, ...] = ()
    weights: npt.NDArray[np.float32] | None = None
    groups: npt.NDArray[np.int64] | None = None
    times: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, order: npt.NDArray[np.int64] | slice) -> Lines:
        """Returns the lines at the positions ``order``, (m) int64 or a slice, whose lines are a view."""
        return Lines(
            self.numeric[order],
            self.keys[order],
            self.labels[order],
            tuple(lists.take(order) for lists in self.lists),
            None if self.weights is None else self.weights[order],
            None if self.groups is None else self.groups[order],
            None if self.times is None else self.times[order],
        )


def concatenate(parts: Sequence[Lines]) -> Lines:
    """Joins the lines of ``parts``, which must have at least one part, in order."""
    return Lines(
        np.concatenate([part.numeric for part in parts]),
        np.concatenate([part.keys for part in parts]),
        np.concatenate([part.labels for part in parts]),
        tuple(Jagged.concatenate(lists) for lists in zip(*(part.lists for part in parts), strict=True)),
        _joined([part.weights for part in parts]),
        _joined([part.groups for part in parts]),
        _joined([part.times for part in parts]),
    )


def _joined(parts: Sequence[npt.NDArray[Any] | None]) -> npt.NDArray[Any] | None:
    there = [part for part in parts if part is not None]
    return np.concatenate(there) if there else None
