"""Decodes columns of Arrow by the features of a job (``features:``)."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_hexdigest

from ....cpp_ext import _client
from ....proto.config.data_config import ColumnsSchema
from ....proto.errors import InvalidArgument
from ....proto.features.cells import Cells
from ....proto.features.compute import Array, computed, numbers_before_statistics
from ....proto.features.feature_set import FeatureSet
from ....proto.features.jagged import Jagged
from ....proto.features.kinds import BucketizedFeature, Feature, ListOfKeys, NumericFeature
from ..bad_line import BadLine, BadLinePolicy
from ..features import BucketFeature, DenseFeature, FeatureSpec
from ..line_decoder import Lines, concatenate
from ..source import DecodedPart
from ..tensor_features import read_vocabulary
from .columns import ColumnDecoder, ColumnRoles, Inputs, labels_of


def roles_of_features(schema: ColumnsSchema, features: FeatureSet) -> ColumnRoles:
    """Returns the roles of the columns that the features of a job read.

    Args:
        schema: the section ``data.columns``, which has the labels.
        features: the features.
    """
    numbers = [feature for feature in features.features if _is_number(feature)]
    keys = [feature for feature in features.features if not _is_number(feature) and not _is_list(feature)]
    lists = [feature for feature in features.features if _is_list(feature)]
    counts = {feature.name: features.keys_of(feature.name) for feature in features.features}
    spec = FeatureSpec(
        dense=tuple(
            DenseFeature(
                feature.name,
                at,
                standardize=feature.scale == "standardize",
                min_max=feature.scale == "min_max",
                given=feature.statistics,
                default=feature.default,
            )
            for at, feature in enumerate(numbers)
            if isinstance(feature, NumericFeature)
        ),
        categorical=tuple(feature.name for feature in keys),
        buckets=tuple(
            BucketFeature(feature.name, at, feature.quantiles)
            for at, feature in enumerate(numbers)
            if isinstance(feature, BucketizedFeature) and feature.quantiles is not None
        ),
        key_counts=tuple((name, count) for name, count in counts.items() if count is not None),
        options=tuple((feature.name, _options(feature, features)) for feature in features.features),
        lists=tuple(feature.name for feature in lists),
        labels=tuple(schema.labels),
    )
    return ColumnRoles(
        labels=labels_of(schema),
        numeric=tuple(dict.fromkeys(name for feature in numbers for name in feature.columns)),
        categorical=(),
        spec=spec,
        others=tuple(dict.fromkeys(name for feature in (*keys, *lists) for name in feature.columns)),
        weight=schema.sample_weight,
        group=schema.group,
    )


def _options(feature: Feature, features: FeatureSet) -> str:
    """Returns the options of a feature as JSON, with a digest of its vocabulary in place of the file's path."""
    options = feature.model_dump(mode="json", exclude_unset=True)
    if feature.name in features.vocabularies:
        options["vocabulary"] = xxh3_64_hexdigest(features.vocabularies[feature.name].data)
    return json.dumps(options, sort_keys=True)


@lru_cache(maxsize=4)
def feature_set(features: tuple[Feature, ...]) -> FeatureSet:
    """Returns the features of a job with their vocabularies, which are read once in a process.

    Raises:
        InvalidArgument, NotFound: a vocabulary is wrong, or does not exist.
    """
    return replace(FeatureSet.of(features, read_vocabulary), hasher=_client.text_keys)


def _is_number(feature: Feature) -> bool:
    """Whether a feature is decoded as a number, of which statistics are taken before it becomes an input."""
    return isinstance(feature, NumericFeature) or (
        isinstance(feature, BucketizedFeature) and feature.quantiles is not None
    )


def _is_list(feature: Feature) -> bool:
    return isinstance(feature, ListOfKeys)


class FeatureDecoder(ColumnDecoder):
    """Decodes tables of one job by its features. It has no state between calls.

    Args:
        roles: the roles of the columns.
        features: the features.
        on_bad_line: "error" raises at a row that a feature refuses; "skip" leaves it out and counts it.
    """

    def __init__(self, roles: ColumnRoles, features: FeatureSet, on_bad_line: Literal["error", "skip"]) -> None:
        super().__init__(roles, on_bad_line)
        self._features, self._skips = features, on_bad_line == "skip"
        self._numbers = [feature for feature in features.features if _is_number(feature)]
        others = [feature for feature in features.features if not _is_number(feature)]
        self._keys = [feature for feature in others if not _is_list(feature)]
        self._lists = [feature for feature in others if _is_list(feature)]

    def inputs(self, table: Any, path: str) -> Inputs:
        """Returns the numbers before they are scaled, (n, numbers) float64, the keys, (n, keys) int64, and lists."""
        rows = table.num_rows
        numbers = np.empty((rows, len(self._numbers)), dtype=np.float64, order="F")
        for at, feature in enumerate(self._numbers):
            numbers[:, at] = numbers_before_statistics(feature, self._cells(table, feature, path))
        keys = np.empty((rows, len(self._keys)), dtype=np.int64, order="F")
        for at, feature in enumerate(self._keys):
            keys[:, at] = self._computed(table, feature, path)
        return numbers, keys, tuple(self._lists_of(table, feature, path) for feature in self._lists)

    def _computed(self, table: Any, feature: Feature, path: str) -> Array:
        statistics = self._features.statistics.get(feature.name)
        vocabulary = self._features.vocabularies.get(feature.name)
        return computed(feature, self._cells(table, feature, path), statistics, vocabulary)

    def _lists_of(self, table: Any, feature: Feature, path: str) -> Jagged:
        made = self._computed(table, feature, path)
        assert isinstance(made, Jagged)
        return made

    def decode(self, table: Any, path: str, numbers: npt.NDArray[np.int64]) -> DecodedPart:
        """Decodes the rows of a table; rows are looked at one by one where a feature refuses one of them."""
        try:
            return super().decode(table, path, numbers)
        except BadLine:
            raise
        except InvalidArgument:
            policy = BadLinePolicy("skip" if self._skips else "error")
            good = [part for at in range(table.num_rows) if (part := self._row(table, path, numbers, at, policy))]
            lines = concatenate([part.lines for part in good]) if good else self.none()
            return DecodedPart(lines, policy.count, policy.first)

    def _row(
        self, table: Any, path: str, numbers: npt.NDArray[np.int64], at: int, policy: BadLinePolicy
    ) -> DecodedPart | None:
        try:
            return super().decode(table.slice(at, 1), path, numbers[at : at + 1])
        except BadLine as bad:
            policy.meet(bad)
        except InvalidArgument as error:
            policy.meet(BadLine(path, int(numbers[at]), None, str(error).removeprefix(f"{path}: "), unit="row"))
        return None

    def none(self) -> Lines:
        """Returns no samples."""
        lists = [Jagged.none(has_weights=getattr(feature, "weights", None) is not None) for feature in self._lists]
        return self.without_rows(len(self._numbers), len(self._keys), tuple(lists))

    def _cells(self, table: Any, feature: Feature, path: str) -> Cells:
        return Cells(table, feature.name, path, self._features.hasher)
