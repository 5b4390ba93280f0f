"""Reads the columns of features from a file, in batches of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.dataset as pa_dataset

from ...proto.errors import DataLoss, InvalidArgument, NotFound, not_allowed
from ...proto.features.base import CellKind
from ...proto.features.cells import RefusedRow
from ...proto.features.feature_set import FeatureSet

_FORMATS = {".parquet": "parquet", ".orc": "orc", ".arrow": "feather", ".feather": "feather", ".jsonl": "json"}


@dataclass(frozen=True)
class TextOptions:
    """How a CSV file writes its fields.

    Attributes:
        delimiter: the character between two fields.
        list_delimiter: the text between two elements of a list within a field.
        missing: the texts that mean a missing value, besides the empty field.

    Raises:
        InvalidArgument: a delimiter is not one character, or empty.
    """

    delimiter: str = ","
    list_delimiter: str = "|"
    missing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.delimiter) != 1 or not self.delimiter.isascii():
            raise not_allowed("--delimiter", self.delimiter, "one ASCII character")
        if not self.list_delimiter:
            raise not_allowed("--list-delimiter", self.list_delimiter, "a text that is not empty")


def is_with_types(path: Path) -> bool:
    """Returns whether a file has a format with types, by the end of its name; any other is CSV with a header."""
    return path.suffix in _FORMATS


def read_columns(
    path: Path,
    features: FeatureSet,
    batch_rows: int,
    text: TextOptions | None = None,
    *,
    keep: Sequence[str] = (),
    nulls: bool = False,
) -> Iterator[pa.Table]:
    """Yields the columns of features from a file, one batch of rows at a time.

    The end of the name tells the format: .parquet, .orc, .arrow, .feather, .jsonl; any other is CSV with a header. A
    cell of a CSV file is what the features read: a number, a text, or a list; an empty one is null.

    Args:
        path: the path of the file.
        features: the features; their columns are read.
        batch_rows: the number of rows of a batch at most.
        text: how a CSV file writes its fields; None: with the defaults.
        keep: other columns that are read as well.
        nulls: whether a column that the file lacks is a column of nulls, which features have defaults for.

    Raises:
        NotFound: the file does not exist.
        InvalidArgument: the file lacks a column, or a value of a CSV file is no number.
        DataLoss: the file is damaged.
    """
    if not path.is_file():
        raise NotFound(f"--input {path}: the file does not exist")
    text = text or TextOptions()
    try:
        source = pa_dataset.dataset(path, format=_FORMATS.get(path.suffix) or _csv_of(features, text))
        names = ", ".join(source.schema.names)
        for name in keep:
            if name not in source.schema.names:
                raise InvalidArgument(f"--keep {name}: {path} has no such column; columns: {names}")
        absent = [name for name in features.columns if name not in source.schema.names]
        if absent and (not nulls or len(absent) == len(features.columns)):
            raise InvalidArgument(
                f"{path}: there is no column {absent[0]!r}, which the features read; columns: {names}"
            )
        there = dict.fromkeys([*(name for name in features.columns if name not in absent), *keep])
        for batch in source.to_batches(columns=list(there), batch_size=batch_rows):
            if batch.num_rows:
                table = pa.Table.from_batches([batch])
                for name in absent:
                    table = table.append_column(name, pa.nulls(len(table)))
                yield table if is_with_types(path) else _typed(table, features, text, str(path))
    except (pa.ArrowInvalid, OSError) as error:
        kind = InvalidArgument if path.suffix not in _FORMATS else DataLoss
        raise kind(f"{path}: {' '.join(str(error).split())}") from None


def naming_rows(path: Path, predict: Callable[[pa.Table], Any]) -> Callable[[pa.Table], Any]:
    """Returns a model that names the row of the file where a feature refuses it.

    Args:
        path: the path of the file whose columns the model is called with, batch after batch.
        predict: the model.
    """
    before = 0

    def call(columns: pa.Table) -> Any:
        nonlocal before
        try:
            output = predict(columns)
        except RefusedRow as refused:
            place = f"{path}, row {before + refused.row + 1}, column {refused.column}"
            raise InvalidArgument(f"{place}: {refused.problem}") from None
        before += columns.num_rows
        return output

    return call


def _csv_of(features: FeatureSet, text: TextOptions) -> pa_dataset.CsvFileFormat:
    types = dict.fromkeys(features.columns, pa.string())
    convert = pa_csv.ConvertOptions(column_types=types, null_values=["", *text.missing], strings_can_be_null=True)
    return pa_dataset.CsvFileFormat(
        parse_options=pa_csv.ParseOptions(delimiter=text.delimiter), convert_options=convert
    )


def _typed(table: pa.Table, features: FeatureSet, text: TextOptions, where: str) -> pa.Table:
    """Returns columns of texts as what the features read of them; others, and columns of nulls, stay as they are."""
    kinds: dict[str, set[CellKind]] = {}
    for feature in features.features:
        for name, kind in feature.cells.items():
            kinds.setdefault(name, set()).add(kind)
    arrays = {name: table.column(name) for name in table.column_names}
    for name, found in kinds.items():
        if pa.types.is_null(arrays[name].type):
            continue
        cells = pa.concat_arrays(arrays[name].chunks)
        if found == {"number"}:
            cells = _numbers(cells, name, where)
        elif found == {"text", "number"}:
            cells = _integers(cells, name, where)
        elif found != {"text"}:
            if len(found) > 1:
                raise InvalidArgument(
                    f"{where}: column {name!r} is read as a list and as something else; use a file with types"
                )
            cells = _lists(cells, name, text, where, has_numbers=found == {"numbers"})
        arrays[name] = cells
    return pa.table(arrays)


def _numbers(cells: pa.Array, name: str, where: str) -> pa.Array:
    texts = pc.ascii_trim_whitespace(cells)
    try:
        return texts.cast(pa.float64())
    except pa.ArrowInvalid:
        for text in texts:
            try:
                text.cast(pa.float64())
            except pa.ArrowInvalid:
                raise InvalidArgument(f"{where}: column {name!r}: {text.as_py()!r} is no number") from None
        raise


def _lists(cells: pa.Array, name: str, text: TextOptions, where: str, *, has_numbers: bool) -> pa.Array:
    parts = pc.split_pattern(cells, text.list_delimiter)
    is_missing = pc.is_in(parts.values, pa.array(["", *text.missing]))
    items = pc.if_else(is_missing, pa.scalar(None, pa.string()), parts.values)
    values = _numbers(items, name, where) if has_numbers else items
    return pa.ListArray.from_arrays(parts.offsets, values, mask=parts.is_null())


def _integers(cells: pa.Array, name: str, where: str) -> pa.Array:
    """Returns texts that are both tokens and numbers as integers, of which each has one text."""
    try:
        numbers = cells.cast(pa.int64())
        is_same = pc.all(pc.equal(numbers.cast(pa.string()), cells)).as_py() in (True, None)
    except pa.ArrowInvalid:
        is_same = False
    if not is_same:
        raise InvalidArgument(
            f"{where}: column {name!r} is read as a number and as a text, so that it must hold plain integers; use a "
            "file with types for others"
        )
    return numbers
