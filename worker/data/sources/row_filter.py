"""Turns the predicate of ``data.where`` into an Arrow expression."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs, types

from ....proto.config.row_filter import Absence, Both, Column, Not, OneOf, Predicate, Scalar
from ....proto.errors import InvalidArgument


@dataclass(frozen=True)
class Selection:
    """The rows of a file that a job reads.

    Attributes:
        expression: the Arrow expression of ``data.where``; None: all rows are read.
        names: the columns that it reads.
        schema: the columns of the file and of its partition.
        partition: the columns that the path gives, as Arrow scalars.
    """

    expression: Any
    names: tuple[str, ...]
    schema: Any
    partition: Mapping[str, Any]

    @property
    def is_of_paths(self) -> bool:
        """Whether the path of the file decides for all of its rows alike."""
        return all(name in self.partition for name in self.names)


def expression_of(predicate: Predicate, schema: Any, path: str) -> Any:
    """Returns the predicate as an Arrow expression over the columns of a file.

    Args:
        predicate: the predicate.
        schema: the names and types of the file's columns.
        path: the path of the file, for error texts.

    Raises:
        InvalidArgument: a column is compared with a value or a column of another type.
    """
    expression = _expression(predicate, schema, path)
    try:
        schema.empty_table().filter(expression)
    except pa.ArrowException as error:
        raise InvalidArgument(f"data.where: it does not fit the columns of {path}: {error}") from error
    return expression


def _expression(predicate: Predicate, schema: Any, path: str) -> Any:
    if isinstance(predicate, Both):
        parts = [_expression(part, schema, path) for part in predicate.parts]
        return reduce(lambda a, b: a & b if predicate.word == "and" else a | b, parts)
    if isinstance(predicate, Not):
        return ~_expression(predicate.of, schema, path)
    if isinstance(predicate, Absence):
        return pc.field(predicate.column.name).is_null()
    if isinstance(predicate, OneOf):
        # Each value is compared, as Arrow's is_in would take null for a value that is not among them.
        equal = [_compared(predicate.column, "==", value, schema, path) for value in predicate.values]
        return _any(equal) if equal else pc.scalar(False)
    return _compared(predicate.left, predicate.operator, predicate.right, schema, path)


def partition_expression(partition: Mapping[str, Any]) -> Any:
    """Returns what is known of every row of a file with the columns of a partition; None where nothing is.

    Args:
        partition: the columns that the path gives, as Arrow scalars.
    """
    known = [
        pc.field(name) == pc.scalar(value) if value.is_valid else pc.field(name).is_null()
        for name, value in partition.items()
    ]
    return reduce(lambda a, b: a & b, known) if known else None


def may_select(selection: Selection) -> bool:
    """Returns False where the path of a file shows that no row is selected; nothing is read."""
    if selection.expression is None:
        return True
    if selection.is_of_paths:
        row = pa.table({name: pa.repeat(value, 1) for name, value in selection.partition.items()})
        return bool(row.filter(selection.expression).num_rows)
    known = partition_expression(selection.partition)
    if known is None:
        return True
    import pyarrow.dataset as ds  # it imports pandas where that is installed, which takes time

    file_system, form = fs.LocalFileSystem(), ds.ParquetFileFormat()  # of a file that is not looked at
    fragment = form.make_fragment("unread", filesystem=file_system, partition_expression=known)
    dataset = ds.FileSystemDataset([fragment], selection.schema, form, file_system)
    return any(True for _ in dataset.get_fragments(filter=selection.expression))


def _any(expressions: list[Any]) -> Any:
    """Joins expressions by ``or`` as a balanced tree, since Arrow walks it recursively."""
    if len(expressions) == 1:
        return expressions[0]
    middle = len(expressions) // 2
    return _any(expressions[:middle]) | _any(expressions[middle:])


def _compared(left: Column | Scalar, operator: str, right: Column | Scalar, schema: Any, path: str) -> Any:
    kind = _type_of(left, schema) if isinstance(left, Column) else _type_of(right, schema)
    a, b = _side(left, kind, path), _side(right, kind, path)
    comparisons = {"==": a == b, "!=": a != b, "<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}
    return comparisons[operator]


def _type_of(column: Column | Scalar, schema: Any) -> Any:
    assert isinstance(column, Column)
    kind = schema.field(column.name).type
    return kind.value_type if types.is_dictionary(kind) else kind


def _side(side: Column | Scalar, kind: Any, path: str) -> Any:
    if isinstance(side, Column):
        field = pc.field(side.name)
        return field.cast(pa.float64()) if types.is_decimal(kind) else field  # Arrow compares no decimal with a float
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    try:
        if is_number and isinstance(side, int | float) and not isinstance(side, bool):
            return pc.scalar(side)
        if isinstance(side, str) and not is_number:
            return pc.scalar(pa.scalar(side).cast(kind))  # a text names a date or a time as well
        if types.is_boolean(kind) and isinstance(side, bool):
            return pc.scalar(side)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        pass
    raise InvalidArgument(f"data.where: {side!r} cannot be compared with a column of type {kind} of {path}")
