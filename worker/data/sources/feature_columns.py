"""Decodes columns of Arrow by the features of a job (``features:``)."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ....cpp_ext import _client
from ....proto.config.data_config import SampleColumns
from ....proto.errors import InvalidArgument
from ....proto.features.base import CellKind, Feature
from ....proto.features.cells import Cells, RefusedRow
from ....proto.features.compute import Array, computed, numbers_before_statistics
from ....proto.features.feature_set import FeatureSet
from ....proto.features.jagged import Jagged
from ....proto.features.kept import digest_of
from ....proto.features.kinds import BucketizedFeature, IdFeature, ListOfKeys, NumericFeature, TimeFeature
from ....proto.features.translation import features_of_columns
from ..bad_line import BadLine, BadLinePolicy
from ..decoded import Lines, concatenate
from ..feature_tensors import read_vocabulary
from ..features import FeatureSpec
from ..source import DecodedPart
from .columns import ColumnDecoder, Inputs
from .roles import COUNT, LIST, NUMBER, TEXT, TIME, ColumnRoles, InputColumn, labels_of


def roles_of(schema: SampleColumns, features: FeatureSet, *, is_translated: bool) -> ColumnRoles:
    """Returns the roles of the columns of a job.

    Args:
        schema: the section that names labels, weight and group.
        features: the features.
        is_translated: whether the features are those of ``numeric``, ``categorical`` and ``buckets`` of the section.

    Raises:
        InvalidArgument: a feature reads a column that is no input.
    """
    if not is_translated:
        schema.check_features(features.features)
    keys = [feature for feature in features.features if not _is_number(feature) and not _is_list(feature)]
    lists = [feature for feature in features.features if _is_list(feature)]
    counts = {} if is_translated else {feature.name: features.keys_of(feature.name) for feature in features.features}
    labels = labels_of(schema)
    spec = FeatureSpec(
        dense=tuple(feature for feature in features.features if isinstance(feature, NumericFeature)),
        categorical=tuple(feature.name for feature in keys),
        buckets=tuple(
            feature
            for feature in features.features
            if isinstance(feature, BucketizedFeature) and feature.quantiles is not None
        ),
        key_counts=tuple((name, count) for name, count in counts.items() if count is not None),
        options=tuple((feature.name, _options(feature, features)) for feature in features.features),
        lists=tuple(feature.name for feature in lists),
        labels=tuple(schema.labels),
        pools=tuple(features.pools.items()),
        targets=tuple((label.name, label.described()) for label in labels),
    )
    inputs = [
        InputColumn(_setting(schema, feature, is_translated), column, kind, _expected(feature, kind))
        for feature in features.features
        for column, kind in feature.cells.items()
    ]
    return ColumnRoles(
        schema.section,
        labels,
        tuple(inputs),
        spec,
        schema.sample_weight,
        schema.group,
        schema.timestamp,
        schema.timestamp_unit,
    )


def translated(schema: SampleColumns) -> tuple[Feature, ...]:
    """Returns the features of ``numeric``, ``categorical`` and ``buckets`` of a section.

    Raises:
        InvalidArgument: a column has two roles; the group and the timestamp may be inputs as well.
    """
    keys = tuple(str(column) for column in schema.categorical)
    roles = [column for setting, column in schema.roles.items() if not schema.may_be_input(setting)]
    names = [*roles, *dict.fromkeys([*schema.numeric, *schema.buckets]), *keys]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidArgument(
            f"{schema.section}: column {twice} has two roles; allowed: one of label, sample_weight, categorical, or "
            "numeric and buckets"
        )
    return features_of_columns(schema.numeric, keys, schema.buckets)


def _setting(schema: SampleColumns, feature: Feature, is_translated: bool) -> str:
    if not is_translated:
        return f"features.{feature.name}"
    return f"{schema.section}.{'categorical' if isinstance(feature, IdFeature) else 'numeric or buckets'}"


def _expected(feature: Feature, kind: CellKind) -> str:
    if kind == "number":
        return NUMBER
    if kind in ("texts", "numbers"):
        return LIST
    if isinstance(feature, TimeFeature):
        return TIME if feature.unit is None else COUNT
    return TEXT


def _options(feature: Feature, features: FeatureSet) -> str:
    """Returns the options of a feature as JSON, with a digest of its vocabulary in place of the file's path."""
    options = feature.model_dump(mode="json", exclude_unset=True)
    digest = digest_of(features, feature.name)
    if digest is not None:
        options["vocabulary"] = digest
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
        is_text: whether tables are decoded lines of text.
    """

    def __init__(
        self,
        roles: ColumnRoles,
        features: FeatureSet,
        on_bad_line: Literal["error", "skip"],
        *,
        is_text: bool = False,
    ) -> None:
        super().__init__(roles, on_bad_line, is_text=is_text)
        self._features, self._skips = features, on_bad_line == "skip"
        self._numbers: tuple[Feature, ...] = (*roles.spec.dense, *roles.spec.buckets)
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
        """Decodes the rows of a table; the rows that features refuse are found by halving it."""
        try:
            return super().decode(table, path, numbers)
        except RefusedRow as refused:
            rows = table.num_rows
            if rows == 1:
                policy = BadLinePolicy("skip" if self._skips else "error")
                policy.meet(BadLine(path, int(numbers[0]), refused.column, refused.problem, self._unit))
                return DecodedPart(self.none(), policy.count, policy.first)
        first = self.decode(table.slice(0, rows // 2), path, numbers[: rows // 2])
        second = self.decode(table.slice(rows // 2), path, numbers[rows // 2 :])
        lines = concatenate([first.lines, second.lines])
        return DecodedPart(lines, first.bad + second.bad, first.first_bad or second.first_bad)

    def none(self) -> Lines:
        """Returns no samples."""
        lists = [Jagged.none(has_weights=getattr(feature, "weights", None) is not None) for feature in self._lists]
        return self.without_rows(len(self._numbers), len(self._keys), tuple(lists))

    def _cells(self, table: Any, feature: Feature, path: str) -> Cells:
        if self._is_text:
            table = pa.table({name: self.column(table, name, kind) for name, kind in feature.cells.items()})
        return Cells(table, feature.name, path, self._features.hasher)
