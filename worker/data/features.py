"""From decoded lines to what a model reads: transforms of numbers, and numbers cut into buckets.

Transforms of a number x, in this order:

* ``log``: ``sign(x) * log(1 + |x|)``, defined everywhere (Criteo's counts reach -3).
* ``standardize``: ``(x - mean) / std`` over the training file, after ``log`` when both are asked for; std 0 counts
  as 1.
* a missing number is 0 after these: the mean, when standardised.

A *bucket* column makes one more sparse id of a number: the index of its quantile bucket over the training file,
edges included on the left, 0 .. buckets-1, and ``buckets`` when missing. When the file has fewer distinct values than
that, each has a bucket of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .line_decoder import Lines

_QUANTILE_SAMPLE_ROWS = 200_000
_SAMPLE_SEED = 20


@dataclass(frozen=True)
class DenseFeature:
    """A numeric input: ``source`` is a column of ``Lines.numeric``."""

    name: str
    source: int
    log: bool = False
    standardize: bool = False


@dataclass(frozen=True)
class BucketFeature:
    """A number as a sparse id: ``source`` is a column of ``Lines.numeric``."""

    name: str
    source: int
    buckets: int


@dataclass(frozen=True)
class FeatureSpec:
    """What a model reads: ``dense`` numbers, and sparse ids of ``categorical`` columns, then of ``buckets``."""

    dense: tuple[DenseFeature, ...]
    categorical: tuple[str, ...]
    buckets: tuple[BucketFeature, ...] = ()

    @property
    def sparse_names(self) -> tuple[str, ...]:
        """Names of the sparse columns, in the order of ``Batch.sparse``."""
        return (*self.categorical, *(bucket.name for bucket in self.buckets))

    @property
    def needs_fit(self) -> bool:
        """Whether the transforms depend on the training file."""
        return bool(self.buckets) or any(feature.standardize for feature in self.dense)


@dataclass(frozen=True)
class Features:
    """A spec with its statistics: a pure function from lines to model inputs.

    Attributes:
        mean, std: (n_dense) float64; 0 and 1 where not standardised.
        edges: one sorted float64 array a bucket feature, at most buckets - 1 inner edges.
    """

    spec: FeatureSpec
    mean: npt.NDArray[np.float64]
    std: npt.NDArray[np.float64]
    edges: tuple[npt.NDArray[np.float64], ...] = ()

    def dense(self, lines: Lines) -> npt.NDArray[np.float32]:
        """(n, n_dense) float32."""
        out = np.empty((len(lines), len(self.spec.dense)), dtype=np.float32)
        for column, feature in enumerate(self.spec.dense):
            value = (_transformed(lines, feature) - self.mean[column]) / self.std[column]
            out[:, column] = np.nan_to_num(value, nan=0.0)
        return out

    def sparse(self, lines: Lines) -> npt.NDArray[np.int64]:
        """(n, n_sparse) int64."""
        ids = [lines.keys]
        for feature, edges in zip(self.spec.buckets, self.edges, strict=True):
            value = lines.numeric[:, feature.source]
            bucket = np.where(np.isnan(value), feature.buckets, np.searchsorted(edges, value, side="right"))
            ids.append(bucket.astype(np.int64)[:, None])
        return np.concatenate(ids, axis=1)

    def state(self) -> dict[str, Any]:
        """The statistics as plain lists."""
        return {
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
            "edges": [edges.tolist() for edges in self.edges],
        }

    @staticmethod
    def from_state(spec: FeatureSpec, state: dict[str, Any]) -> Features:
        """The inverse of :meth:`state`."""
        edges = tuple(np.array(values, dtype=np.float64) for values in state["edges"])
        return Features(spec, np.array(state["mean"]), np.array(state["std"]), edges)


def _transformed(lines: Lines, feature: DenseFeature) -> npt.NDArray[np.float64]:
    value = lines.numeric[:, feature.source]
    return np.sign(value) * np.log1p(np.abs(value)) if feature.log else value


def fit(spec: FeatureSpec, training: Iterable[Lines]) -> Features:
    """Takes the statistics of one pass over the training lines.

    Mean and std are exact (merged as in Chan et al. 1979). Quantiles are exact up to 200,000 rows, and beyond that of
    a uniform sample of so many rows, drawn with a fixed seed. ``training`` is not touched when nothing needs it.
    """
    width = len(spec.dense)
    if not spec.needs_fit:
        return Features(spec, np.zeros(width), np.ones(width))
    moments = [_Moments() for _ in spec.dense]
    samples = [_Sample(seed=_SAMPLE_SEED + index) for index in range(len(spec.buckets))]
    for lines in training:
        for feature, moment in zip(spec.dense, moments, strict=True):
            if feature.standardize:
                moment.add(_present(_transformed(lines, feature)))
        for bucket, sample in zip(spec.buckets, samples, strict=True):
            sample.add(_present(lines.numeric[:, bucket.source]))
    edges = tuple(sample.edges(bucket.buckets) for bucket, sample in zip(spec.buckets, samples, strict=True))
    return Features(spec, np.array([m.mean for m in moments]), np.array([m.std for m in moments]), edges)


def _present(value: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return value[~np.isnan(value)]


class _Moments:
    """Running mean and sum of squared deviations."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0

    def add(self, values: npt.NDArray[np.float64]) -> None:
        if not len(values):
            return
        mean = float(values.mean())
        squares = float(np.square(values - mean).sum())
        total = self.count + len(values)
        delta = mean - self.mean
        self._squares += squares + delta * delta * self.count * len(values) / total
        self.mean += delta * len(values) / total
        self.count = total

    @property
    def std(self) -> float:
        """Population standard deviation; 1 when the values are all equal, or none was added."""
        return (self._squares / self.count) ** 0.5 if self._squares > 0 else 1.0


class _Sample:
    """A uniform sample of a stream: each value draws a random rank, the lowest ranks stay."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._values = np.empty(0)
        self._ranks = np.empty(0)

    def add(self, values: npt.NDArray[np.float64]) -> None:
        self._values = np.concatenate([self._values, values])
        self._ranks = np.concatenate([self._ranks, self._random.random(len(values))])
        if len(self._values) > _QUANTILE_SAMPLE_ROWS:
            keep = np.argpartition(self._ranks, _QUANTILE_SAMPLE_ROWS)[:_QUANTILE_SAMPLE_ROWS]
            self._values, self._ranks = self._values[keep], self._ranks[keep]

    def edges(self, buckets: int) -> npt.NDArray[np.float64]:
        distinct = np.unique(self._values)
        if len(distinct) <= buckets:
            return distinct[1:]
        return np.unique(np.quantile(self._values, np.arange(1, buckets) / buckets, method="higher"))
