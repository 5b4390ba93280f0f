"""The kinds of features: the options of each, as a job file's ``features:`` and Python give them.

A feature has a name, which is the name of the tensor that the model's ``forward`` takes, and one or more columns.
Features whose values are keys look up a table; several may share one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, model_validator

from ..errors import InvalidArgument, not_allowed
from ..options.strict_model import FromList
from ..options.units import TimeUnit
from .base import MOST_KEYS, CellKind, Feature, KeyOptions, OneColumn

Pool: TypeAlias = Literal["sum", "mean", "sqrtn", "max"]
_POOL = "How a model with an argument pools pools the rows of a list; null: as that argument says."


class IdFeature(OneColumn, KeyOptions):
    """A key of an integer or a text; an integer's token is its decimal text. Gives (n) int64."""

    kind: Literal["id"] = "id"


class NumericFeature(OneColumn):
    """A number, changed in this order: ``clip``, ``log1p``, ``scale``. Gives (n) float32.

    Attributes:
        clip: the least and the greatest value; None: all values.
        log1p: whether ``sign(x) log(1 + |x|)`` is taken.
        scale: "standardize": ``(x - mean) / std``; "min_max": ``(x - low) / (high - low)``; "none".
        statistics: (mean, std) or (low, high) of ``scale``, after ``clip`` and ``log1p``; None: a pass over the
            training data finds them.
        default: what a null becomes, after all of it.
    """

    kind: Literal["dense"] = "dense"
    clip: Annotated[tuple[float, float] | None, FromList] = Field(None, description="Least and greatest value.")
    log1p: bool = Field(False, description="Whether sign(x) log(1 + |x|) is taken.")
    scale: Literal["none", "standardize", "min_max"] = Field(
        "none", description="standardize: by mean and std; min_max: to [0, 1]."
    )
    statistics: Annotated[tuple[float, float] | None, FromList] = Field(
        None, description="Mean and std, or low and high; null: those of the training data."
    )
    default: float = Field(0.0, allow_inf_nan=False, description="What a null becomes.")

    @model_validator(mode="after")
    def _is_possible(self) -> NumericFeature:
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise not_allowed("clip", list(self.clip), "[low, high] with low < high")
        if self.statistics is None:
            return self
        if self.scale == "none":
            raise InvalidArgument("statistics: has no effect with scale none")
        first, second = self.statistics
        is_right = second > 0 if self.scale == "standardize" else second > first
        if not (math.isfinite(first) and math.isfinite(second) and is_right):
            words = "[mean, std] with std > 0" if self.scale == "standardize" else "[low, high] with low < high"
            raise not_allowed("statistics", list(self.statistics), words)
        return self

    @property
    def cells(self) -> dict[str, CellKind]:
        """What a cell of each column is."""
        return dict.fromkeys(self.columns, "number")

    @property
    def needs_statistics(self) -> bool:
        """Whether a pass over the training data must find mean and std, or low and high."""
        return self.scale != "none" and self.statistics is None


class BucketizedFeature(OneColumn):
    """The number of the bucket that a number falls into, as a key; a bucket includes its left edge. Gives (n) int64.

    Attributes:
        boundaries: the edges between buckets, ascending; None: quantiles.
        quantiles: the number of buckets with as many training samples each; None: boundaries.
        table: the name of the table that the keys look up; None: the name of the feature.

    The bucket of a null is the number ``quantiles``, or the one behind the last bucket between boundaries. There are
    fewer buckets than ``quantiles`` when the data have fewer distinct values.
    """

    kind: Literal["bucketize"] = "bucketize"
    boundaries: Annotated[tuple[float, ...] | None, FromList] = Field(None, description="Edges between the buckets.")
    quantiles: int | None = Field(None, ge=2, le=65536, description="Number of buckets of as many samples each.")
    table: str | None = Field(None, min_length=1, description="Table of the keys; null: the feature's name.")

    @model_validator(mode="after")
    def _has_edges(self) -> BucketizedFeature:
        if (self.boundaries is None) == (self.quantiles is None):
            raise InvalidArgument("boundaries, quantiles: exactly one of them is needed")
        edges = self.boundaries
        if edges is not None and (not edges or any(not a < b for a, b in itertools.pairwise(edges))):
            raise not_allowed("boundaries", list(edges), "numbers in ascending order, at least one")
        return self

    @property
    def cells(self) -> dict[str, CellKind]:
        """What a cell of each column is."""
        return dict.fromkeys(self.columns, "number")

    @property
    def null_bucket(self) -> int:
        """The key of a null, which is the greatest key of the feature."""
        return len(self.boundaries or ()) + 1 if self.quantiles is None else self.quantiles

    @property
    def needs_statistics(self) -> bool:
        """Whether a pass over the training data must find the edges."""
        return self.quantiles is not None


class CrossFeature(Feature):
    """The key of the values of two or more columns together. Gives (n) int64.

    The key is ``sr.hash_key`` of the tuple of their tokens. A null has the empty token.

    Attributes:
        of: the names of the columns.
        modulo: the keys are taken modulo this number; None: they have 63 bits.
        table: the name of the table that the keys look up; None: the name of the feature.
    """

    kind: Literal["cross"] = "cross"
    of: Annotated[tuple[str, ...], FromList] = Field(min_length=2, max_length=16, description="Columns, two or more.")
    modulo: int | None = Field(None, ge=1, le=MOST_KEYS, description="Keys are taken modulo this; null: 63 bits.")
    table: str | None = Field(None, min_length=1, description="Table of the keys; null: the feature's name.")

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that the feature reads."""
        return self.of


class ListOfKeys(OneColumn, KeyOptions):
    """The base of kinds that give the keys of a list: values (m) int64 and offsets (n + 1) int64.

    A null list is empty, unless ``on_null`` refuses it; a null within a list has the token ``default``.

    Attributes:
        max_len: the number of keys that a list may have; None: as many as there are.
    """

    max_len: int | None = Field(None, ge=1, le=1 << 20, description="Most keys of a list; null: no limit.")


class MultiHotFeature(ListOfKeys):
    """The keys of a list column without order, pooled by the model. A list longer than ``max_len`` is refused.

    Attributes:
        weights: the name of a list column with a weight for each key; None: no weights.
        pool: how a model of sparserow pools the rows of a list; None: as its argument ``pools`` says.
    """

    kind: Literal["multi_hot"] = "multi_hot"
    weights: str | None = Field(None, min_length=1, description="List column with a weight of each key.")
    pool: Pool | None = Field(None, description=_POOL)

    @model_validator(mode="after")
    def _weights_can_be_pooled(self) -> MultiHotFeature:
        if self.weights is not None and self.pool == "max":
            raise InvalidArgument("weights: is not possible with pool max; allowed: sum, mean, sqrtn")
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that the feature reads."""
        return super().columns if self.weights is None else (*super().columns, self.weights)

    @property
    def cells(self) -> dict[str, CellKind]:
        """What a cell of each column is."""
        return {name: "numbers" if name == self.weights else "texts" for name in self.columns}


class SequenceFeature(ListOfKeys):
    """The keys of a list column in their order. A list longer than ``max_len`` is cut.

    Attributes:
        keep: the end of a list that is kept when it is cut.
    """

    kind: Literal["sequence"] = "sequence"
    keep: Literal["last", "first"] = Field("last", description="End of a list that is kept when it is cut.")

    @property
    def cells(self) -> dict[str, CellKind]:
        """What a cell of each column is."""
        return dict.fromkeys(self.columns, "texts")

    @model_validator(mode="after")
    def _keep_has_an_effect(self) -> SequenceFeature:
        if self.max_len is None and "keep" in self.model_fields_set:
            raise InvalidArgument("keep: has no effect without max_len")
        return self


class SplitFeature(ListOfKeys):
    """The keys of the parts of a text, in their order. An empty text has no part. A longer list is cut.

    Attributes:
        delimiter: the text between two parts.
        keep: the end of a list that is kept when it is cut.
        pool: how a model of sparserow pools the rows of a list; None: as its argument ``pools`` says, and without
            that it takes them as a sequence.
    """

    kind: Literal["split"] = "split"
    delimiter: str = Field("|", min_length=1, max_length=16, description="Text between two parts.")
    keep: Literal["last", "first"] = Field("last", description="End of a list that is kept when it is cut.")
    pool: Pool | None = Field(None, description=_POOL)


class TimeFeature(OneColumn):
    """A part of a timestamp as a key, counted from 0. Gives (n) int64.

    A null has a key of its own, behind the others. A timestamp without a zone is in UTC, and so is a date. A text of
    ISO 8601 is one as well, and may end in Z or an offset.

    Attributes:
        part: "hour" (24 keys), "weekday" (7, Monday is 0), "day" of the month (31) or "month" (12).
        zone: the name of the time zone in which the part is taken.
        unit: what integers count since 1970 in UTC: "s", "ms", "us" or "ns"; None: integers are no times.
        table: the name of the table that the keys look up; None: the name of the feature.
    """

    kind: Literal["time"] = "time"
    part: Literal["hour", "weekday", "day", "month"] = Field("hour", description="Part of the timestamp.")
    zone: str = Field("UTC", min_length=1, description="Time zone in which the part is taken.")
    unit: TimeUnit | None = Field(
        None, description="What integers count since 1970 in UTC: s, ms, us or ns; null: integers are no times."
    )
    table: str | None = Field(None, min_length=1, description="Table of the keys; null: the feature's name.")

    @property
    def null_key(self) -> int:
        """The key of a null, which is the greatest key of the feature."""
        return {"hour": 24, "weekday": 7, "day": 31, "month": 12}[self.part]


KINDS: dict[str, type[Feature]] = {
    "id": IdFeature,
    "dense": NumericFeature,
    "bucketize": BucketizedFeature,
    "cross": CrossFeature,
    "multi_hot": MultiHotFeature,
    "sequence": SequenceFeature,
    "split": SplitFeature,
    "time": TimeFeature,
}


def feature_of(name: str, options: Mapping[str, Any]) -> Feature:
    """Returns the feature of an entry of a job file's ``features:``.

    Args:
        name: the name of the entry.
        options: the options, with ``kind``.

    Raises:
        InvalidArgument: an option is unknown, of a wrong type or out of range; the text names it.
    """
    kind = options.get("kind")
    if kind not in KINDS:
        raise not_allowed(f"features.{name}.kind", kind, ", ".join(KINDS))
    try:
        return KINDS[kind](name, **options)
    except InvalidArgument as error:
        raise InvalidArgument(f"features.{name}: {error}") from None
