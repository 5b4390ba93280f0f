"""The roles of the columns of a job, and the check that a file has them with types that their roles allow."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyarrow import types

from ....proto.config.data_config import SampleColumns
from ....proto.errors import InvalidArgument
from ....proto.features.base import CellKind
from ....proto.features.cells import is_plain_text
from ....proto.features.times import COUNT_FORM, TIME_FORM
from ....proto.options.units import TimeUnit
from ..features import FeatureSpec
from ..line_layout import FieldKind

_NEAREST, _LISTED = 3, 12


@dataclass(frozen=True)
class LabelRole:
    """A label and its column.

    Attributes:
        setting: the key of the job file that names the column.
        column: the name of the column.
        values: the number of each allowed text; None: the column has numbers.
        is_integer: whether the numbers must be integers, of at most 24 bits, which float32 holds exactly.
    """

    setting: str
    column: str
    values: dict[str, float] | None
    is_integer: bool = False

    @property
    def kind(self) -> FieldKind:
        """What is made of a cell."""
        return "number" if self.values is None else "label"

    @property
    def name(self) -> str:
        """The name of the label, as a job file has it."""
        return self.setting.rpartition(".")[2]

    def described(self) -> str:
        """Returns what makes the label, as JSON; a position of a reader keeps it."""
        return json.dumps({"column": self.column, "values": self.values, "integer": self.is_integer}, sort_keys=True)

    @property
    def expected(self) -> str:
        """What the label may be, for error texts."""
        if self.values is not None:
            return " or ".join(repr(text) for text in self.values)
        return "an integer in [-2**24, 2**24]" if self.is_integer else "a finite number"


@dataclass(frozen=True)
class InputColumn:
    """A column that a feature reads.

    Attributes:
        setting: the key of the job file that names the column.
        column: the name of the column.
        kind: what the feature makes of a cell.
        expected: the types that a column of a file may have, in words.
    """

    setting: str
    column: str
    kind: CellKind
    expected: str


@dataclass(frozen=True)
class ColumnRoles:
    """What a job reads of a file with columns.

    Attributes:
        section: the section of the job file that names the labels, the weight and the group.
        labels: the labels, at least one.
        inputs: the columns that features read; one that several of them read stands there for each.
        spec: the inputs of the model that are made of them.
        weight: the column of the samples' weights; None: there is none.
        group: the column of the samples' groups; None: there is none.
        timestamp: the column of the samples' times; None: there is none.
        timestamp_unit: what its integers count since 1970; None: integers are no times.
    """

    section: str
    labels: tuple[LabelRole, ...]
    inputs: tuple[InputColumn, ...]
    spec: FeatureSpec
    weight: str | None = None
    group: str | None = None
    timestamp: str | None = None
    timestamp_unit: TimeUnit | None = None

    @property
    def uses(self) -> tuple[tuple[str, FieldKind], ...]:
        """The columns and what is made of the cells of each; a column may have several uses."""
        labels = [(label.column, label.kind) for label in self.labels]
        inputs = [(each.column, each.kind) for each in self.inputs]
        weight: list[tuple[str, FieldKind]] = [] if self.weight is None else [(self.weight, "number")]
        group: list[tuple[str, FieldKind]] = [] if self.group is None else [(self.group, "text")]
        time: list[tuple[str, FieldKind]] = [] if self.timestamp is None else [(self.timestamp, "text")]
        return tuple(dict.fromkeys([*labels, *inputs, *weight, *group, *time]))

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that are read, each once."""
        return tuple(dict.fromkeys(column for column, _ in self.uses))

    @property
    def coded(self) -> tuple[str, ...]:
        """The columns whose texts are looked up or hashed, so that each different text is best seen once."""
        return tuple(dict.fromkeys(column for column, kind in self.uses if kind in ("label", "text", "texts")))


def labels_of(schema: SampleColumns) -> tuple[LabelRole, ...]:
    """Returns the labels that a job names."""
    if schema.label is not None:
        values = {text: float(value) for text, value in schema.label_values.items()}
        return (LabelRole(f"{schema.section}.label", str(schema.label), values),)
    made = []
    for name, label in schema.labels.items():
        texts = None if label.dtype is not None else label.values or {"0": 0.0, "1": 1.0}
        setting = f"{schema.section}.labels.{name}"
        made.append(LabelRole(setting, label.column or name, texts, label.dtype == "int64"))
    return tuple(made)


def check_columns(roles: ColumnRoles, filtered: Sequence[str], schema: Any, path: str) -> None:
    """Checks that a file has the columns, with types that their roles allow.

    Args:
        roles: the roles of the columns.
        filtered: the columns that ``data.where`` reads.
        schema: the names and types of the file's columns.
        path: the path of the file.

    Raises:
        InvalidArgument: a column is missing, stands twice, or has a type that its role does not allow.
    """
    for setting, name, allowed in _wanted(roles, filtered):
        found = schema.names.count(name)
        if found > 1:
            raise InvalidArgument(f"{path}: a column {name!r} stands twice; expected distinct names")
        if not found:
            near = difflib.get_close_matches(name, schema.names, n=_NEAREST, cutoff=0.5)
            listed = ", ".join(schema.names[:_LISTED]) + (", ..." if len(schema.names) > _LISTED else "")
            known = f"nearest: {', '.join(near)}" if near else f"it has {listed}"
            raise InvalidArgument(f"{setting}: no column {name!r} in {path}; {known}")
        kind = schema.field(name).type
        if allowed is not None and not any(is_allowed(kind) for is_allowed in _ALLOWED[allowed]):
            raise InvalidArgument(f"{setting}: column {name} of {path} is {kind}; expected {allowed}")


def _wanted(roles: ColumnRoles, filtered: Sequence[str]) -> Iterator[tuple[str, str, str | None]]:
    """Yields the columns to look for: the setting that names one, its name, and what it may be; None: anything."""
    for label in roles.labels:
        yield label.setting, label.column, NUMBER if label.values is None else _ANY
    for each in roles.inputs:
        yield each.setting, each.column, each.expected
    if roles.weight is not None:
        yield f"{roles.section}.sample_weight", roles.weight, NUMBER
    if roles.group is not None:
        yield f"{roles.section}.group", roles.group, TEXT
    if roles.timestamp is not None:
        yield f"{roles.section}.timestamp", roles.timestamp, TIME if roles.timestamp_unit is None else COUNT
    for name in filtered:
        yield "data.where", name, None


def _is_number(kind: Any) -> bool:
    return bool(
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_decimal(kind)
        or types.is_boolean(kind)
        or types.is_null(kind)
    )


def _is_text(kind: Any) -> bool:
    if types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return is_plain_text(kind) or bool(types.is_integer(kind) or types.is_boolean(kind) or types.is_null(kind))


def _is_list(kind: Any) -> bool:
    return bool(
        types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind) or types.is_null(kind)
    )


def _is_time(kind: Any) -> bool:
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return is_plain_text(kind) or bool(types.is_timestamp(kind) or types.is_date(kind) or types.is_null(kind))


NUMBER, TEXT, LIST, TIME, COUNT = "a number", "a text or an integer", "a list", TIME_FORM, COUNT_FORM
_ANY = "a text or a number"
_ALLOWED = {
    NUMBER: (_is_number,),
    TEXT: (_is_text,),
    LIST: (_is_list,),
    TIME: (_is_time,),
    COUNT: (_is_time, types.is_integer),
    _ANY: (_is_number, _is_text),
}
