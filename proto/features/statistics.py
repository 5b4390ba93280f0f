"""What a pass over training data learns of numbers: mean and deviation, range, quantiles."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .base import Feature
from .kinds import BucketizedFeature, NumericFeature

QUANTILE_SAMPLE_ROWS = 200_000
_SAMPLE_SEED = 20
_ROUNDING_UNITS = 64  # error of a mean, in units in the last place of the largest value; pairwise sums have a few
Statistics: TypeAlias = tuple[float, ...]


class Moments:
    """A running mean and a running sum of squared deviations (Chan, Golub & LeVeque, 1979)."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0
        self._largest = 0.0  # of the absolute values

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Adds values, (n) float64 without NaN."""
        if not len(values):
            return
        mean = float(values.mean())
        squares = float(np.square(values - mean).sum())
        total = self.count + len(values)
        delta = mean - self.mean
        self._squares += squares + delta * delta * self.count * len(values) / total
        self.mean += delta * len(values) / total
        self.count = total
        self._largest = max(self._largest, float(np.abs(values).max()))

    @property
    def pair(self) -> tuple[float, float]:
        """The mean and the population standard deviation.

        The deviation is 1 when no value was added, or when it is no more than what rounding alone gives equal values:
        their mean is off by some units in the last place.
        """
        rounding = _ROUNDING_UNITS * np.finfo(np.float64).eps * self._largest
        if self._squares <= self.count * rounding * rounding:
            return self.mean, 1.0
        return self.mean, math.sqrt(self._squares / self.count)


class Range:
    """The least and the greatest of the values."""

    def __init__(self) -> None:
        self._low, self._high = math.inf, -math.inf

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Adds values, (n) float64 without NaN."""
        if len(values):
            self._low, self._high = min(self._low, float(values.min())), max(self._high, float(values.max()))

    @property
    def pair(self) -> tuple[float, float]:
        """The least and the greatest value; (least, least + 1) when all are equal, and (0, 1) when none was added."""
        if self._low > self._high:
            return 0.0, 1.0
        return self._low, self._high if self._high > self._low else self._low + 1.0


class QuantileSample:
    """A uniform sample of a stream: each value draws a random rank, and the values with the lowest ranks stay.

    Quantiles are exact up to 200,000 values; beyond, they are those of a sample of that size, drawn by a fixed seed.
    """

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._values = np.empty(0)
        self._ranks = np.empty(0)

    def add(self, values: npt.NDArray[np.float64]) -> None:
        """Adds values, (n) float64 without NaN."""
        self._values = np.concatenate([self._values, values])
        self._ranks = np.concatenate([self._ranks, self._random.random(len(values))])
        if len(self._values) > QUANTILE_SAMPLE_ROWS:
            keep = np.argpartition(self._ranks, QUANTILE_SAMPLE_ROWS)[:QUANTILE_SAMPLE_ROWS]
            self._values, self._ranks = self._values[keep], self._ranks[keep]

    def edges(self, buckets: int) -> tuple[float, ...]:
        """Returns the inner edges of so many buckets; with fewer distinct values each has a bucket of its own."""
        distinct = np.unique(self._values)
        if len(distinct) <= buckets:
            return tuple(distinct[1:].tolist())
        return tuple(np.unique(np.quantile(self._values, np.arange(1, buckets) / buckets, method="higher")).tolist())


class StatisticsPass:
    """Learns the statistics of features in one pass over training data.

    Mean, deviation and range are exact. Quantiles are exact up to 200,000 rows, and beyond those of a uniform sample
    of 200,000 rows, drawn with a fixed seed for each feature.

    Args:
        features: the features, of which those are learnt that need it.

    Attributes:
        features: those features.
    """

    def __init__(self, features: Iterable[Feature]) -> None:
        self.features = tuple(feature for feature in features if feature.needs_statistics)
        quantiles = [feature.name for feature in self.features if isinstance(feature, BucketizedFeature)]
        self._learnt: dict[str, Moments | Range | QuantileSample] = {}
        for feature in self.features:
            if isinstance(feature, BucketizedFeature):
                self._learnt[feature.name] = QuantileSample(_SAMPLE_SEED + quantiles.index(feature.name))
            else:
                assert isinstance(feature, NumericFeature)
                self._learnt[feature.name] = Moments() if feature.scale == "standardize" else Range()

    def add(self, feature: Feature, values: npt.NDArray[np.float64]) -> None:
        """Adds numbers of a feature before they are scaled, (n) float64; NaN is a missing one."""
        self._learnt[feature.name].add(values[~np.isnan(values)])

    def found(self) -> dict[str, Statistics]:
        """Returns (mean, std), (low, high) or the edges between buckets, by the name of each feature."""
        return {feature.name: self._of(feature) for feature in self.features}

    def _of(self, feature: Feature) -> Statistics:
        learnt = self._learnt[feature.name]
        if not isinstance(learnt, QuantileSample):
            return learnt.pair
        assert isinstance(feature, BucketizedFeature)
        assert feature.quantiles is not None
        return learnt.edges(feature.quantiles)
