"""Decodes columns of Arrow by the features of a job (``features:``)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ....cpp_ext import _client
from ....proto.config.data_config import SampleColumns
from ....proto.features.base import CellKind, Feature
from ....proto.features.cells import Cells, RefusedRow
from ....proto.features.compute import Array, computed, numbers_before_statistics
from ....proto.features.feature_set import FeatureSet
from ....proto.features.jagged import Jagged
from ....proto.features.kept import digest_of
from ....proto.features.kinds import BucketizedFeature, ListOfKeys, NumericFeature, TimeFeature
from ..decoded import Lines
from ..feature_tensors import read_vocabulary
from ..features import FeatureSpec
from .columns import ColumnDecoder, Inputs, RefusedRows
from .roles import COUNT, LIST, NUMBER, TEXT, TIME, ColumnRoles, InputColumn, labels_of

_Values = TypeVar("_Values", npt.NDArray[Any], Jagged)


def roles_of(schema: SampleColumns, features: FeatureSet) -> ColumnRoles:
    """Returns the roles of the columns of a job.

    Args:
        schema: the section that names labels, weight and group.
        features: the features.

    Raises:
        InvalidArgument: a feature reads a column that is no input.
    """
    schema.check_features(features.features)
    keys = [feature for feature in features.features if not _is_number(feature) and not _is_list(feature)]
    lists = [feature for feature in features.features if _is_list(feature)]
    counts = {feature.name: features.keys_of(feature.name) for feature in features.features}
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
        InputColumn(f"features.{feature.name}", column, kind, _expected(feature, kind))
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
    return FeatureSet.of(features, read_vocabulary, _client.text_keys)


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
        self._features = features
        self._numbers: tuple[Feature, ...] = (*roles.spec.dense, *roles.spec.buckets)
        others = [feature for feature in features.features if not _is_number(feature)]
        self._keys = [feature for feature in others if not _is_list(feature)]
        self._lists = [feature for feature in others if _is_list(feature)]

    def inputs(self, table: Any, path: str) -> tuple[Inputs, RefusedRows | None]:
        """Returns the numbers before they are scaled, (m, numbers) float64, the keys, (m, keys) int64, and lists.

        They are those of the rows that no feature refuses; the others are returned too, None where there is none.
        """
        refused = _Refusals(table.num_rows)
        numbers = [self._accepted(table, feature, path, refused, _numbers_of) for feature in self._numbers]
        keys = [self._accepted(table, feature, path, refused, self._keys_of) for feature in self._keys]
        lists = [self._accepted(table, feature, path, refused, self._lists_of) for feature in self._lists]
        rows = table.num_rows if refused.first is None else int((~refused.rows).sum())
        inputs = (
            _side_by_side([refused.without(*found) for found in numbers], rows, np.float64),
            _side_by_side([refused.without(*found) for found in keys], rows, np.int64),
            tuple(refused.without(*found) for found in lists),
        )
        return inputs, None if refused.first is None else RefusedRows(refused.rows, *refused.first[1:])

    def _accepted(
        self, table: Any, feature: Feature, path: str, refused: _Refusals, compute: Callable[[Feature, Cells], _Values]
    ) -> tuple[_Values, npt.NDArray[np.bool_] | None]:
        """Returns what a feature makes of the rows that it does not refuse, and which they are, (n) bool; None: all.

        It is computed again once for each reason that it has to refuse rows, and for no row alone.
        """
        columns = self._columns_of(table, feature)
        is_left = None
        while True:
            try:
                return compute(feature, Cells(columns, feature.name, path, self._features.hasher)), is_left
            except RefusedRow as error:
                if is_left is None:
                    is_left = np.ones(table.num_rows, dtype=np.bool_)
                places = np.flatnonzero(is_left)[error.rows]
                is_left[places] = False
                refused.add(places, error)
                columns = columns.filter(pa.array(~error.rows))

    def _computed(self, feature: Feature, cells: Cells) -> Array:
        statistics = self._features.statistics.get(feature.name)
        return computed(feature, cells, statistics, self._features.vocabularies.get(feature.name))

    def _keys_of(self, feature: Feature, cells: Cells) -> npt.NDArray[Any]:
        made = self._computed(feature, cells)
        assert not isinstance(made, Jagged)
        return made

    def _lists_of(self, feature: Feature, cells: Cells) -> Jagged:
        made = self._computed(feature, cells)
        assert isinstance(made, Jagged)
        return made

    def none(self) -> Lines:
        """Returns no samples."""
        lists = [Jagged.none(has_weights=getattr(feature, "weights", None) is not None) for feature in self._lists]
        return self.without_rows(len(self._numbers), len(self._keys), tuple(lists))

    def _columns_of(self, table: Any, feature: Feature) -> Any:
        return pa.table({name: self.column(table, name, kind) for name, kind in feature.cells.items()})


class _Refusals:
    """Collects the rows of a table that features refuse.

    Args:
        rows: the number of rows of the table.

    Attributes:
        rows: which rows were refused so far, (n) bool.
        first: the number of the first of them, the column of its bad cell, and what is wrong with it; None: no row was.
    """

    def __init__(self, rows: int) -> None:
        self.rows = np.zeros(rows, dtype=np.bool_)
        self.first: tuple[int, str, str] | None = None

    def add(self, places: npt.NDArray[np.int64], error: RefusedRow) -> None:
        """Adds the rows at ``places``, (k) int64 ascending, which a feature refused with ``error``."""
        self.rows[places] = True
        if self.first is None or places[0] < self.first[0]:
            self.first = int(places[0]), error.column, error.problem

    def without(self, values: _Values, is_left: npt.NDArray[np.bool_] | None) -> _Values:
        """Returns those values of a feature whose rows no feature refused.

        Args:
            values: the values.
            is_left: the rows that they are of, (n) bool; None: all.
        """
        if self.first is None:
            return values
        stays = ~self.rows if is_left is None else ~self.rows[is_left]
        places = np.flatnonzero(stays)
        return values.take(places) if isinstance(values, Jagged) else values[places]


def _numbers_of(feature: Feature, cells: Cells) -> npt.NDArray[Any]:
    return numbers_before_statistics(feature, cells)


def _side_by_side(columns: Sequence[npt.NDArray[Any]], rows: int, kind: type[np.generic]) -> npt.NDArray[Any]:
    """Returns columns of (rows) as an array of (rows, columns), column after column in memory."""
    made = np.empty((rows, len(columns)), dtype=kind, order="F")
    for at, values in enumerate(columns):
        made[:, at] = values
    return made
