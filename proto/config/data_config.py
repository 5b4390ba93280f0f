"""The section ``data`` of a job file: which files are read, and the use of their columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, PrivateAttr, model_validator

from ..errors import InvalidArgument
from ..options.csv_dialect import CsvDialect
from ..options.path_text import Paths
from ..options.strict_model import StrictModel
from ..options.units import TimeUnit
from .criteo_columns import CRITEO_FEATURES
from .days_config import DaysConfig
from .row_filter import parse_where
from .stream_config import StreamConfig

ColumnRef: TypeAlias = str | int


LabelValues: TypeAlias = dict[str, Literal[0, 1]]
_LABEL_VALUES: Any = Field(
    {"0": 0, "1": 1},
    description="Texts of the label and the class of each; a line or row with another text is malformed.",
)


class LabelConfig(StrictModel):
    """One of several labels: ``values`` gives the number of each text, or ``dtype`` takes the numbers as they are."""

    column: Annotated[str | None, Field(min_length=1)] = Field(None, description="Column; null: the label's name.")
    values: dict[str, float] | None = Field(
        None,
        min_length=1,
        description="Texts of the label and the number of each; a row with another text is malformed. null, without "
        "dtype too: 0 and 1.",
        json_schema_extra={"allowed": "a mapping of texts to numbers"},
    )
    dtype: Literal["float32", "int64"] | None = Field(
        None,
        description="The label is a column of numbers. float32: any finite one. int64: an integer, such as the number "
        "of a class.",
    )

    @model_validator(mode="after")
    def _values_or_dtype(self) -> LabelConfig:
        if self.values is not None and self.dtype is not None:
            raise InvalidArgument("values: is not possible beside dtype; remove one of them")
        return self


class SampleColumns(StrictModel):
    """What a job reads of each sample beside its features, whatever the format of its files."""

    section: ClassVar[str]

    label: ColumnRef | None = Field(None, description="The column to predict; null: see labels.")
    label_values: LabelValues = _LABEL_VALUES
    labels: dict[str, LabelConfig] = Field(
        {},
        description="Labels by name, in place of label, for a model of one's own and its tasks.",
        json_schema_extra={"allowed": "a mapping of sections with column and values or dtype"},
    )
    sample_weight: Annotated[str | None, Field(min_length=1)] = Field(
        None, description="Column of a number, at least 0, by which the loss of a sample is multiplied; null: 1."
    )
    group: Annotated[str | None, Field(min_length=1)] = Field(
        None, description="Column of the group of a sample, such as its user, for metrics by group; null: none."
    )
    timestamp: Annotated[str | None, Field(min_length=1)] = Field(
        None,
        description="Column of the time of a sample, a timestamp, a date or a text of ISO 8601: windows of "
        "metrics.progressive say in metrics.file from when to when their samples are. null: none.",
    )
    timestamp_unit: TimeUnit | None = Field(
        None,
        description="What integers of timestamp count since 1970 in UTC: s, ms, us or ns; null: they are no times.",
    )

    @property
    def roles(self) -> dict[str, str]:
        """The columns that are no inputs of the model, by the setting that names each."""
        named = {f"{self.section}.label": str(self.label)} if self.label is not None else {}
        named |= {f"{self.section}.labels.{name}": label.column or name for name, label in self.labels.items()}
        others = (("sample_weight", self.sample_weight), ("group", self.group), ("timestamp", self.timestamp))
        return named | {f"{self.section}.{setting}": column for setting, column in others if column is not None}

    def may_be_input(self, setting: str) -> bool:
        """Returns whether the column of a role may be an input of the model as well: that of a group or a time."""
        return setting in (f"{self.section}.group", f"{self.section}.timestamp")

    def check_features(self, features: Iterable[Any]) -> None:
        """Raises InvalidArgument when a feature reads a column that is no input; see :meth:`may_be_input`."""
        for feature in features:
            for setting, column in self.roles.items():
                if column in feature.columns and not self.may_be_input(setting):
                    raise InvalidArgument(f"features.{feature.name}: reads {column!r}, which is {setting}")

    @model_validator(mode="after")
    def _one_way_of_labels(self) -> SampleColumns:
        if (self.label is None) == (not self.labels):
            raise InvalidArgument("label: exactly one of label and labels is needed")
        if self.labels and "label_values" in self.model_fields_set:
            raise InvalidArgument(
                "label_values: has no effect beside labels, which have values of their own; remove it"
            )
        columns = list(self.roles.values())
        twice = next((column for column in columns if columns.count(column) > 1), None)
        if self.timestamp_unit is not None and self.timestamp is None:
            raise InvalidArgument("timestamp_unit: has no effect without timestamp; remove it")
        if twice is not None:
            raise InvalidArgument(
                f"column {twice} has two roles; allowed: one of label, sample_weight, group and timestamp"
            )
        return self


class CsvSchema(CsvDialect, SampleColumns):
    """Delimited text: the columns and the use of each. A column is given by its name, or its position from 0."""

    section: ClassVar[str] = "data.csv"


class ColumnsSchema(SampleColumns):
    """Files with named columns: the use of each. Columns that are not named are not read."""

    section: ClassVar[str] = "data.columns"

    label: Annotated[str | None, Field(min_length=1)] = Field(
        None, description="The column to predict; null: see labels."
    )


class _CriteoColumns(ColumnsSchema):
    """The columns of Criteo's layout, which no job names."""

    section: ClassVar[str] = "data.format criteo"


CRITEO_COLUMNS = _CriteoColumns(label="label")
_WITH_COLUMNS = ("parquet", "orc", "arrow", "jsonl")


class DataConfig(StrictModel):
    """The training and test files and their format. Texts whose name ends in .gz or .zst are decompressed."""

    format: Literal["criteo", "csv", "parquet", "orc", "arrow", "jsonl"] = Field(
        "criteo",
        description="criteo: TSV, or CSV with a header. csv: see csv. parquet, orc, arrow (also called Feather) and "
        "jsonl (a JSON object on each line): see columns.",
    )
    train: Paths | None = Field(None, description="Training files, or folders of them; null: see stream.")
    stream: StreamConfig | None = Field(None, description="Events to train on as they come; null: see train.")
    days: DaysConfig | None = Field(
        None, description="Files of one day after another, each trained on by a run of its own; null: see train."
    )
    test: Paths | None = Field(
        None,
        description="Files of the evaluation after each epoch, or folders of them; null, with days alone: those of the "
        "next day.",
    )
    csv: CsvSchema | None = Field(None, description="Columns of the files, with format csv.")
    columns: ColumnsSchema | None = Field(
        None, description="Columns of the files, with format parquet, orc, arrow or jsonl."
    )
    where: str | None = Field(
        None,
        min_length=1,
        description="Rows that are read, with format parquet, orc, arrow or jsonl, such as \"day >= '2024-01-05' and "
        "country in ['DE', 'FR']\"; a folder KEY=VALUE is a column. null: all rows.",
        json_schema_extra={"allowed": "comparisons of columns, in, is None, and, or, not; or null"},
    )
    negatives_keep: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of the training samples with label 0 that are kept; batches are shorter by the others. "
        "Evaluations and the published model correct their logits for it. It needs one task with bce.",
    )
    on_bad_line: Literal["error", "skip"] = Field(
        "error", description="error: a malformed line or row ends the job. skip: it is skipped and counted."
    )
    shuffle_rows: int = Field(
        131072,
        ge=0,
        le=1 << 26,
        description="Number of samples that are shuffled together, beside files and parts of files; 0: file order.",
    )

    _features: tuple[Any, ...] = PrivateAttr(())

    def files(self, which: Literal["train", "test"]) -> tuple[str, ...]:
        """Returns the paths of the files of one kind; of a stream those that are like its events."""
        if which == "test":
            return self.test or ()
        return self.train or (() if self.stream is None else self.stream.like)

    def setting(self, which: Literal["train", "test"]) -> str:
        """Returns the option that names the files of one kind."""
        return "data.stream.like" if which == "train" and self.stream is not None else f"data.{which}"

    @property
    def samples(self) -> SampleColumns:
        """What is read of each sample: the section of the format, or that of Criteo's layout."""
        return self.csv or self.columns or CRITEO_COLUMNS

    @property
    def features(self) -> tuple[Any, ...]:
        """The features of the job (proto/features/kinds.py)."""
        return self._features or (CRITEO_FEATURES if self.format == "criteo" else ())

    def read_features(self, features: tuple[Any, ...]) -> None:
        """Has the readers compute these features; :class:`JobConfig` calls it once."""
        self._features = features

    @model_validator(mode="after")
    def _train_or_stream(self) -> DataConfig:
        if sum(each is not None for each in (self.train, self.stream, self.days)) != 1:
            raise InvalidArgument("train: exactly one of train, stream and days is needed")
        if self.test is None and self.days is None:
            raise InvalidArgument("test: is missing; files of the evaluation are needed but with days")
        if self.stream is not None:
            if self.format not in ("jsonl", "csv"):
                raise InvalidArgument(f"format: {self.format} is not allowed with stream; allowed: jsonl, csv")
            kafka = self.stream.kafka
            if kafka is not None and kafka.protobuf is not None and self.format != "jsonl":
                raise InvalidArgument("stream.kafka.protobuf: needs format jsonl, the format of the files like")
            if kafka is not None and kafka.dead_letters is not None and self.on_bad_line == "error":
                raise InvalidArgument("stream.kafka.dead_letters: has no effect with on_bad_line error; set skip")
        return self

    @model_validator(mode="after")
    def _schema_of_the_format(self) -> DataConfig:
        for section, formats in (("csv", ("csv",)), ("columns", _WITH_COLUMNS)):
            is_there = getattr(self, section) is not None
            if (self.format in formats) != is_there:
                needs = "has no use for" if is_there else "needs"
                raise InvalidArgument(f"format {self.format} {needs} a section {section}")
        if self.where is not None:
            if self.format not in _WITH_COLUMNS:
                raise InvalidArgument(f"where: needs format {', '.join(_WITH_COLUMNS)}; format is {self.format}")
            parse_where(self.where)
        return self
