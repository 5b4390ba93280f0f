"""The inputs of a model as a reader has them: decoded samples with the statistics of the training files.

Numbers are decoded before they are scaled, so that one pass over decoded samples finds the statistics. What a feature
makes of them is in ``proto/features/``, the same for every format and for serving.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...proto.features.compute import bucket_of, scaled
from ...proto.features.kinds import BucketizedFeature, NumericFeature
from ...proto.features.statistics import Statistics, StatisticsPass
from .batch import BatchNames
from .decoded import Lines


@dataclass(frozen=True)
class FeatureSpec:
    """The inputs that a model reads.

    ``Lines.numeric`` has a column for each of ``dense``, and then one for each of ``buckets``.

    Attributes:
        dense: the numeric inputs.
        categorical: names of the features that give a key, which are the first sparse inputs.
        buckets: the features of quantile buckets, which are the last sparse inputs.
        key_counts: how many keys a sparse input can give, by its name; inputs without a bound are not there.
        options: the options of features that decide their keys or numbers, by the name of the feature, as JSON.
        lists: names of the features that give lists of keys.
        labels: names of the labels, where the job names several.
        pools: how lists are pooled, by the name of each feature that says so.
        targets: the column and the values of each label, as JSON by its name.
    """

    dense: tuple[NumericFeature, ...]
    categorical: tuple[str, ...]
    buckets: tuple[BucketizedFeature, ...] = ()
    key_counts: tuple[tuple[str, int], ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    lists: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    pools: tuple[tuple[str, str], ...] = ()
    targets: tuple[tuple[str, str], ...] = ()

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
        options, names = dict(self.options), self.names
        groups = (("dense", names.dense), ("sparse", names.sparse), ("list", names.lists))
        return {f"{kind} {name}": options[name] for kind, group in groups for name in group}

    @property
    def needs_fit(self) -> bool:
        """Whether features need statistics of the training files."""
        return any(feature.needs_statistics for feature in (*self.dense, *self.buckets))


@dataclass(frozen=True)
class FittedFeatures:
    """The inputs of a model with their statistics: a pure function from decoded samples to inputs.

    Attributes:
        spec: the inputs.
        statistics: (mean, std), (low, high) or edges, by the name of a feature; those that the job gives as well.
    """

    spec: FeatureSpec
    statistics: Mapping[str, Statistics] = field(default_factory=dict)

    def dense(self, lines: Lines) -> npt.NDArray[np.float32]:
        """Returns the numeric inputs of the samples, (n, n_dense) float32."""
        out = np.empty((len(lines), len(self.spec.dense)), dtype=np.float32)
        for at, feature in enumerate(self.spec.dense):
            out[:, at] = scaled(feature, lines.numeric[:, at], self.statistics.get(feature.name))
        return out

    def sparse(self, lines: Lines) -> npt.NDArray[np.int64]:
        """Returns the sparse inputs of the samples, (n, n_sparse) int64."""
        ids = [lines.keys]
        for at, feature in enumerate(self.spec.buckets, start=len(self.spec.dense)):
            ids.append(bucket_of(feature, lines.numeric[:, at], self.statistics[feature.name])[:, None])
        return np.concatenate(ids, axis=1)

    def state(self) -> dict[str, Any]:
        """Returns the statistics as plain lists by the name of a feature."""
        return {name: list(values) for name, values in self.statistics.items()}

    @staticmethod
    def from_state(spec: FeatureSpec, state: dict[str, Any]) -> FittedFeatures:
        """Returns the features with the given inputs and the statistics from :meth:`state`."""
        return FittedFeatures(spec, {name: tuple(values) for name, values in state.items()})


def fit(spec: FeatureSpec, training: Iterable[Lines], known: Mapping[str, Statistics] | None = None) -> FittedFeatures:
    """Computes the statistics of the inputs in one pass over the training samples; see :class:`StatisticsPass`.

    Args:
        spec: the inputs.
        training: the training samples; they are not read when no input lacks statistics.
        known: statistics that are not computed, by the name of a feature; None: there are none.
    """
    numbers = (*spec.dense, *spec.buckets)
    own = {each.name: each.statistics for each in spec.dense if each.statistics is not None}
    given: dict[str, Statistics] = {**own, **(known or {})}
    learnt = StatisticsPass(each for each in numbers if each.name not in given)
    for lines in training if learnt.features else ():
        for feature in learnt.features:
            learnt.add(feature, lines.numeric[:, numbers.index(feature)])
    return FittedFeatures(spec, {**given, **learnt.found()})
