"""``FeatureSet``: all features of a model, as a pure function from columns to arrays by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..errors import FailedPrecondition, InvalidArgument
from ..options.csv_dialect import CsvDialect
from ..row_keys import TextHasher, hash_texts
from .base import Feature
from .cells import Cells, Columns, table_of
from .compute import Array, check_zone, computed, numbers_before_statistics
from .kinds import BucketizedFeature, IdFeature, ListOfKeys, NumericFeature, TimeFeature
from .statistics import Statistics, StatisticsPass
from .vocabulary import Vocabulary

Opener = Callable[[str], bytes]


@dataclass(frozen=True)
class FeatureSet:
    """The features of a model with what was learnt of them. It does not change; :meth:`fit` returns another one.

    Attributes:
        features: the features, in the order of the arrays.
        statistics: by the name of a feature: (mean, std), (low, high), or the edges between buckets.
        vocabularies: by the name of a feature.
        hasher: makes keys of texts.
        csv: how the delimited text of the training files writes its fields; None: it is not known, or there was none.
        rows: by the name of a feature: the number of rows of its table, where the model looks a key up at key modulo
            rows, as models of job files do.
    """

    features: tuple[Feature, ...]
    statistics: Mapping[str, Statistics] = field(default_factory=dict)
    vocabularies: Mapping[str, Vocabulary] = field(default_factory=dict)
    hasher: TextHasher = field(default=hash_texts, compare=False)
    csv: CsvDialect | None = None
    rows: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def of(features: Sequence[Feature], open_file: Opener, hasher: TextHasher = hash_texts) -> FeatureSet:
        """Returns a set of features with the statistics and vocabularies that they name.

        Args:
            features: the features; each name is there once.
            open_file: reads a file by its path or URL, once for all features that name it.
            hasher: makes keys of texts.

        Raises:
            InvalidArgument: there is no feature, a name is there twice, a zone is not known, or a vocabulary is wrong.
        """
        names = [feature.name for feature in features]
        if not names:
            raise InvalidArgument("features: there is none; allowed: at least one")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise InvalidArgument(f"features: two of them have the name {twice!r}")
        statistics: dict[str, Statistics] = {}
        vocabularies: dict[str, Vocabulary] = {}
        by_path: dict[str, Vocabulary] = {}
        for feature in features:
            if isinstance(feature, NumericFeature) and feature.statistics is not None:
                statistics[feature.name] = feature.statistics
            if isinstance(feature, BucketizedFeature) and feature.boundaries is not None:
                statistics[feature.name] = feature.boundaries
            if isinstance(feature, TimeFeature) and not check_zone(feature.zone):
                raise InvalidArgument(
                    f"features.{feature.name}.zone: {feature.zone!r} is no zone of this machine's time zone database "
                    "(Debian: tzdata)"
                )
            path: str | None = getattr(feature, "vocabulary", None)
            if path is not None:
                if path not in by_path:
                    by_path[path] = Vocabulary(open_file(path), path, hasher)
                vocabularies[feature.name] = by_path[path]
        return FeatureSet(tuple(features), statistics, vocabularies, hasher)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of all columns that the features read."""
        return tuple(dict.fromkeys(name for feature in self.features for name in feature.columns))

    @property
    def pools(self) -> dict[str, str]:
        """How lists are pooled, by the name of each feature that says so."""
        found = {feature.name: getattr(feature, "pool", None) for feature in self.features}
        return {name: pool for name, pool in found.items() if pool is not None}

    @property
    def lacks(self) -> tuple[str, ...]:
        """The names of features whose statistics a pass over the training data must find first (:meth:`fit`)."""
        return tuple(
            feature.name
            for feature in self.features
            if feature.needs_statistics and feature.name not in self.statistics
        )

    def with_statistics(self, statistics: Mapping[str, Statistics]) -> FeatureSet:
        """Returns the set with these statistics besides its own."""
        return replace(self, statistics={**self.statistics, **statistics})

    def fit(self, training: Iterable[Columns], where: str = "features") -> FeatureSet:
        """Returns the set with the statistics of the training data, found in one pass.

        :class:`StatisticsPass` says how exact they are.

        Args:
            training: the data, as tables, record batches or mappings; not read when no feature lacks statistics.
            where: where the data come from, which begins error texts.

        Raises:
            InvalidArgument: a column is missing or does not fit; the text names it.
        """
        learnt = StatisticsPass(feature for feature in self.features if feature.name in self.lacks)
        if not learnt.features:
            return self
        for columns in training:
            table = table_of(columns, where)
            for feature in learnt.features:
                learnt.add(feature, numbers_before_statistics(feature, Cells(table, feature.name, where, self.hasher)))
        return self.with_statistics(learnt.found())

    def __call__(self, columns: Columns, where: str = "features") -> dict[str, Array]:
        """Returns the arrays of rows by the names of the features, in their order.

        Args:
            columns: a table, a record batch, or a mapping from names to sequences. Columns that no feature reads are
                not looked at.
            where: where the data come from, which begins error texts.

        Returns:
            For each feature (n) float32, (n) int64, or :class:`Jagged`.

        Raises:
            InvalidArgument: a column is missing or does not fit; the text names it.
            FailedPrecondition: a feature lacks statistics.
        """
        if self.lacks:
            raise FailedPrecondition(
                f"features: {', '.join(self.lacks)} need statistics of the training data; call fit first, or give them"
            )
        table = table_of(columns, where)
        return {
            feature.name: computed(
                feature,
                Cells(table, feature.name, where, self.hasher),
                self.statistics.get(feature.name),
                self.vocabularies.get(feature.name),
            )
            for feature in self.features
        }

    def keys_of(self, name: str) -> int | None:
        """Returns how many keys a feature can give, from 0; None: they have 63 bits, or it gives numbers.

        Args:
            name: the name of the feature.
        """
        feature = next(each for each in self.features if each.name == name)
        if isinstance(feature, TimeFeature):
            return feature.null_key + 1
        if isinstance(feature, BucketizedFeature):
            return feature.null_bucket + 1
        vocabulary = self.vocabularies.get(name)
        if vocabulary is not None:
            assert isinstance(feature, IdFeature | ListOfKeys)
            return len(vocabulary) + feature.unknown_rows
        return getattr(feature, "modulo", None)
