"""Turns decoded lines into the inputs of a model: transforms numbers, and cuts numbers into buckets.

The transforms of a number x are applied in this order:

* ``log``: ``sign(x) * log(1 + |x|)``, which is defined everywhere (Criteo's counts reach -3).
* ``standardize``: ``(x - mean) / std`` over the training files, after ``log`` when both are asked for; a std of 0
  counts as 1.
* A missing number becomes 0 after these transforms, which is the mean when it is standardised.

A *bucket* column turns a number into one more sparse id: the index of its quantile bucket over the training files. A
bucket includes its left edge. Indexes are 0 .. buckets-1, and ``buckets`` for a missing number. When there are fewer
distinct values than buckets, each value has a bucket of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...proto.features.statistics import Moments, QuantileSample, Range
from .batch import BatchNames
from .line_decoder import Lines

_SAMPLE_SEED = 20


@dataclass(frozen=True)
class DenseFeature:
    """A numeric input of the model.

    Attributes:
        name: the name of the input.
        source: the number of its column in ``Lines.numeric``.
        log: whether the logarithm is taken.
        standardize: whether mean and std are removed.
        min_max: whether the range becomes [0, 1].
        given: (mean, std) or (low, high) of the job; None: those of the training files.
        default: what a missing number becomes, after all of it.
    """

    name: str
    source: int
    log: bool = False
    standardize: bool = False
    min_max: bool = False
    given: tuple[float, float] | None = None
    default: float = 0.0

    @property
    def needs_fit(self) -> bool:
        """Whether the transform needs statistics of the training files."""
        return (self.standardize or self.min_max) and self.given is None


@dataclass(frozen=True)
class BucketFeature:
    """A sparse input that is made of a number.

    Attributes:
        name: the name of the input.
        source: the number of its column in ``Lines.numeric``.
        buckets: the number of buckets, without the one for missing numbers.
    """

    name: str
    source: int
    buckets: int


@dataclass(frozen=True)
class FeatureSpec:
    """The inputs that a model reads.

    Attributes:
        dense: the numeric inputs.
        categorical: names of the categorical columns, which are the first sparse inputs.
        buckets: the bucket columns, which are the last sparse inputs.
        key_counts: how many keys a sparse input can give, by its name; inputs without a bound are not there.
        options: the options of features that decide their keys or numbers, by the name of the feature, as JSON.
        lists: names of the features that give lists of keys.
        labels: names of the labels, where the job names several.
    """

    dense: tuple[DenseFeature, ...]
    categorical: tuple[str, ...]
    buckets: tuple[BucketFeature, ...] = ()
    key_counts: tuple[tuple[str, int], ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    lists: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    @property
    def sparse_names(self) -> tuple[str, ...]:
        """The names of the sparse columns, in the order of ``Batch.sparse``."""
        return (*self.categorical, *(bucket.name for bucket in self.buckets))

    @property
    def names(self) -> BatchNames:
        """The names of what a batch holds."""
        return BatchNames(tuple(each.name for each in self.dense), self.sparse_names, self.lists, self.labels)

    def described(self) -> dict[str, str]:
        """Returns what makes each input, as text by its name; a position of a reader keeps it."""
        options = dict(self.options)
        texts = {f"dense {each.name}": f"log {each.log}, standardize {each.standardize}" for each in self.dense}
        texts |= {f"sparse {name}": "a key" for name in self.categorical}
        texts |= {f"sparse {bucket.name}": f"{bucket.buckets} buckets" for bucket in self.buckets}
        texts |= {f"list {name}": "keys" for name in self.lists}
        return {name: options.get(name.partition(" ")[2], text) for name, text in texts.items()}

    @property
    def needs_fit(self) -> bool:
        """Whether the transforms need statistics of the training files."""
        return bool(self.buckets) or any(feature.needs_fit for feature in self.dense)


@dataclass(frozen=True)
class Features:
    """The inputs of a model with their statistics: a pure function from lines to inputs.

    Attributes:
        spec: the inputs.
        mean: what is subtracted from each number, (n_dense) float64: the mean, the least number, or 0.
        std: what each number is divided by then, (n_dense) float64: the standard deviation, the range, or 1.
        edges: for each bucket column, its inner edges: a sorted float64 array of at most buckets - 1 values.
    """

    spec: FeatureSpec
    mean: npt.NDArray[np.float64]
    std: npt.NDArray[np.float64]
    edges: tuple[npt.NDArray[np.float64], ...] = ()

    def dense(self, lines: Lines) -> npt.NDArray[np.float32]:
        """Returns the numeric inputs of the lines, (n, n_dense) float32."""
        dense = self.spec.dense
        values = lines.numeric[:, [feature.source for feature in dense]]
        logs = [column for column, feature in enumerate(dense) if feature.log]
        values[:, logs] = _logarithm(values[:, logs])
        values -= self.mean
        values /= self.std
        np.copyto(values, np.array([feature.default for feature in dense]), where=np.isnan(values))
        return values.astype(np.float32, order="C")

    def sparse(self, lines: Lines) -> npt.NDArray[np.int64]:
        """Returns the sparse inputs of the lines, (n, n_sparse) int64."""
        ids = [lines.keys]
        for feature, edges in zip(self.spec.buckets, self.edges, strict=True):
            value = lines.numeric[:, feature.source]
            bucket = np.where(np.isnan(value), feature.buckets, np.searchsorted(edges, value, side="right"))
            ids.append(bucket.astype(np.int64)[:, None])
        return np.concatenate(ids, axis=1)

    def state(self) -> dict[str, Any]:
        """Returns the statistics as plain lists."""
        return {
            "mean": self.mean.tolist(),
            "std": self.std.tolist(),
            "edges": [edges.tolist() for edges in self.edges],
        }

    @staticmethod
    def from_state(spec: FeatureSpec, state: dict[str, Any]) -> Features:
        """Returns the features with the given inputs and the statistics from :meth:`state`."""
        edges = tuple(np.array(values, dtype=np.float64) for values in state["edges"])
        return Features(spec, np.array(state["mean"]), np.array(state["std"]), edges)


def _transformed(lines: Lines, feature: DenseFeature) -> npt.NDArray[np.float64]:
    value = lines.numeric[:, feature.source]
    return _logarithm(value) if feature.log else value


def _logarithm(value: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.sign(value) * np.log1p(np.abs(value))


def fit(spec: FeatureSpec, training: Iterable[Lines]) -> Features:
    """Computes the statistics of the inputs in one pass over the training lines.

    Mean and std are exact (merged as in Chan et al. 1979). Quantiles are exact up to 200,000 rows; beyond, they are
    those of a uniform sample of 200,000 rows, drawn with a fixed seed.

    Args:
        spec: the inputs.
        training: the training lines; they are not read when no input needs statistics.
    """
    learnt = [Range() if feature.min_max else Moments() for feature in spec.dense]
    samples = [QuantileSample(seed=_SAMPLE_SEED + index) for index in range(len(spec.buckets))]
    for lines in training if spec.needs_fit else ():
        for feature, statistic in zip(spec.dense, learnt, strict=True):
            if feature.needs_fit:
                statistic.add(_present(_transformed(lines, feature)))
        for bucket, sample in zip(spec.buckets, samples, strict=True):
            sample.add(_present(lines.numeric[:, bucket.source]))
    edges = tuple(np.array(sample.edges(bucket.buckets)) for bucket, sample in zip(spec.buckets, samples, strict=True))
    pairs = [_shift_and_scale(feature, found.pair) for feature, found in zip(spec.dense, learnt, strict=True)]
    table = np.array(pairs, dtype=np.float64).reshape(len(spec.dense), 2)
    return Features(spec, table[:, 0], table[:, 1], edges if spec.needs_fit else ())


def _shift_and_scale(feature: DenseFeature, found: tuple[float, float]) -> tuple[float, float]:
    """Returns what is subtracted from a number, and what it is divided by."""
    first, second = found if feature.given is None else feature.given
    if feature.min_max:
        return first, second - first
    return (first, second) if feature.standardize else (0.0, 1.0)


def _present(value: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return value[~np.isnan(value)]
