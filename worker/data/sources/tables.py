"""Files of Arrow columns as a source: Parquet, ORC, Arrow and JSON lines, with Hive partitions and ``data.where``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ....proto.checkpoint.folder import typed
from ....proto.config.row_filter import Predicate, columns_of
from ....proto.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound
from ..bad_line import BadLinePolicy
from ..decoded import Lines
from ..features import FeatureSpec
from ..line_windows import LineWindow
from ..source import DecodedPart, PlannedFile
from ..storage import arrow_file_system
from .columns import ColumnDecoder
from .hive import Partitions
from .lines import changed
from .roles import check_columns
from .row_filter import Selection, expression_of, may_select

_OPEN_FILES = 4
_NUMBER = "__sparserow_number"


@dataclass(frozen=True)
class NumberedRows:
    """Rows of a part.

    Attributes:
        table: the rows as an Arrow table.
        numbers: the number of each row or line in its file, from 1, (n) int64.
    """

    table: Any
    numbers: npt.NDArray[np.int64]


class TableFile(Protocol):
    """An open file with columns.

    Attributes:
        schema: the names and types of its columns.
        is_sequential: whether a part is only reached through those before it.
        has_blanks: whether a part may have fewer rows than were counted, as lines of text may be blank.
    """

    schema: Any
    is_sequential: bool
    has_blanks: bool

    def parts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns the rows of each part, (p) int64, and where each lies, (p, k) int64."""

    def selected(
        self, rows: npt.NDArray[np.int64], places: npt.NDArray[np.int64], selection: Selection
    ) -> npt.NDArray[np.int64]:
        """Returns how many rows of each part pass a selection, (p) int64."""

    def read(self, place: npt.NDArray[np.int64], names: tuple[str, ...], policy: BadLinePolicy) -> NumberedRows:
        """Returns the rows of a part.

        Args:
            place: where the part lies, as :meth:`parts` gives it.
            names: the columns to read, each once.
            policy: what happens to rows that cannot be parsed.
        """

    def first(self, names: tuple[str, ...], policy: BadLinePolicy) -> NumberedRows | None:
        """Returns the rows of the first part, without a look at the others; None when there is none."""


@runtime_checkable
class TextTableFile(Protocol):
    """A :class:`TableFile` whose rows are lines of text."""

    def decode(self, window: LineWindow, names: tuple[str, ...], policy: BadLinePolicy) -> NumberedRows:
        """Returns the rows of lines, which need not be in the file."""


class TableFormat(Protocol):
    """A format of files with columns.

    Attributes:
        name: the word for it in error texts.
    """

    name: str

    def open(self, path: str, names: Sequence[str], coded: Sequence[str]) -> TableFile:
        """Opens a file.

        Args:
            path: the path or URL of the file.
            names: the columns that will be read.
            coded: those whose texts are best seen once, and whose integers are ids.
        """


@contextmanager
def reading(path: str, name: str) -> Iterator[None]:
    """Turns errors of Arrow and of storage into errors of the taxonomy that name the file."""
    try:
        with typed(path):
            try:
                yield
            except FileNotFoundError as error:
                raise NotFound(f"{path}: No such file or directory") from error
            except (PermissionError, IsADirectoryError) as error:
                raise FailedPrecondition(f"{path}: {error}") from error
            except DataLoss:
                raise
            except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                raise DataLoss(f"{path}: the {name} file is damaged or cut short: {error}") from error
    except (DataLoss, FailedPrecondition):
        _check_not_empty(path, name)
        raise


def _check_not_empty(path: str, name: str) -> None:
    file_system, inside = arrow_file_system(path)
    if file_system.get_file_info(inside).size == 0:
        raise InvalidArgument(f"{path}: the file is empty; expected a {name} file")


def numbered_parts(counts: Iterable[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Returns the rows of each part, (p) int64, and its place: (number of the part, rows before it), (p, 2) int64."""
    rows = np.fromiter(counts, dtype=np.int64)
    return rows, np.stack([np.arange(len(rows)), np.cumsum(rows) - rows], axis=1).astype(np.int64)


def numbered_rows(table: Any, before: int) -> NumberedRows:
    """Returns the rows of a part with their numbers in the file.

    Args:
        table: the rows.
        before: the number of rows before them.
    """
    return NumberedRows(table, np.arange(before + 1, before + 1 + table.num_rows))


def count_by_reading(
    file: TableFile, rows: npt.NDArray[np.int64], places: npt.NDArray[np.int64], selection: Selection
) -> npt.NDArray[np.int64]:
    """Returns how many rows of each part pass a selection, by reading the columns that it names."""
    counts = np.zeros_like(rows)
    names = own_names(file.schema, selection.names)
    for part, place in enumerate(places):
        table = with_partition(file.read(place, names, BadLinePolicy()).table, selection.partition)
        counts[part] = table.filter(selection.expression).num_rows
    return counts


def own_names(schema: Any, names: Iterable[str]) -> tuple[str, ...]:
    """Returns those of the names that are columns of a file; its first column when none is, so that rows count."""
    return tuple(name for name in names if name in schema.names) or tuple(schema.names[:1])


def narrow_column(schema: Any) -> tuple[str, ...]:
    """Returns the column of a schema that takes the fewest bytes to count rows by, in a tuple of one or none."""

    def bits(field: Any) -> int:
        try:
            return int(field.type.bit_width)
        except ValueError:  # its values have different lengths
            return 1 << 30

    return tuple(field.name for field in sorted(schema, key=bits)[:1])


def with_partition(table: Any, partition: Mapping[str, Any]) -> Any:
    """Returns a table with the columns that its path gives."""
    rows = table.num_rows
    for name, value in partition.items():
        table = table.append_column(name, pa.repeat(value, rows))
    return table


class TableSource:
    """Reads files of columns; see :class:`~sparserow.worker.data.source.Source`.

    Args:
        form: the format of the files.
        decoder: makes samples of the columns of its roles.
        where: which rows to read; None: all.
        partitions: the columns that the paths give.
        on_bad_line: "error" raises at a malformed row; "skip" leaves it out and counts it.
    """

    def __init__(
        self,
        form: TableFormat,
        decoder: ColumnDecoder,
        where: Predicate | None,
        partitions: Partitions,
        on_bad_line: Literal["error", "skip"],
    ) -> None:
        self._form, self._decoder, self._where, self._partitions = form, decoder, where, partitions
        self._roles, self._on_bad_line = decoder.roles, on_bad_line
        self._open: OrderedDict[str, tuple[TableFile, Selection]] = OrderedDict()

    def spec(self, path: str) -> FeatureSpec:
        """Returns the inputs that the model reads, after checking that the file has their columns."""
        self._file(path)
        return self._roles.spec

    def plan(self, path: str) -> PlannedFile:
        """Returns the parts of a file that have rows which the job reads."""
        file, selection = self._file(path)
        with reading(path, self._form.name):
            rows, places = file.parts()
            if not may_select(selection):
                rows = np.zeros_like(rows)
            elif not selection.is_of_paths:
                rows = file.selected(rows, places, selection)
        kept = np.flatnonzero(rows)
        return PlannedFile(path, rows[kept], places[kept], is_sequential=file.is_sequential)

    def read(self, file: PlannedFile, part: int) -> DecodedPart:
        """Decodes a part."""
        table_file, selection = self._file(file.path)
        policy = BadLinePolicy(self._on_bad_line)
        with reading(file.path, self._form.name):
            rows = table_file.read(file.places[part], own_names(table_file.schema, self._names), policy)
        found = self._decoded(file.path, selection, rows)
        lacking = int(file.rows[part]) - len(found.lines) - found.bad - policy.count
        if lacking < 0 or (lacking and not table_file.has_blanks):
            raise changed(file.path)
        return DecodedPart(found.lines, policy.count + found.bad, policy.first or found.first_bad)

    def first(self, path: str) -> Lines:
        """Returns samples at the beginning of a file."""
        file, selection = self._file(path)
        with reading(path, self._form.name):
            rows = file.first(own_names(file.schema, self._names), BadLinePolicy(self._on_bad_line))
        return self.none(path) if rows is None else self._decoded(path, selection, rows).lines

    def decode_like(self, path: str, window: LineWindow) -> DecodedPart:
        """Decodes lines of JSON, which need not be in a file, as those of a file."""
        file, selection = self._file(path)
        policy = BadLinePolicy(self._on_bad_line)
        assert isinstance(file, TextTableFile)  # as formats of events are texts (stream_config.py)
        found = self._decoded(window.path, selection, file.decode(window, own_names(file.schema, self._names), policy))
        return DecodedPart(found.lines, policy.count + found.bad, policy.first or found.first_bad)

    def _decoded(self, path: str, selection: Selection, rows: NumberedRows) -> DecodedPart:
        """Decodes those rows of a file that the job reads."""
        partition = {name: value for name, value in selection.partition.items() if name in self._names}
        table, numbers = with_partition(rows.table, partition), rows.numbers
        if self._where is not None:
            table = table.append_column(_NUMBER, pa.array(numbers)).filter(selection.expression)
            numbers = table.column(_NUMBER).to_numpy()
        return self._decoder.decode(table, path, numbers)

    def none(self, path: str) -> Lines:  # noqa: ARG002 - lines of text need the path
        """Returns no samples."""
        return self._decoder.none()

    @property
    def _names(self) -> tuple[str, ...]:
        filtered = () if self._where is None else columns_of(self._where)
        return tuple(dict.fromkeys([*self._roles.names, *filtered]))

    def _file(self, path: str) -> tuple[TableFile, Selection]:
        """Returns an open file, whose columns were checked. The last few files stay open."""
        if path not in self._open:
            with reading(path, self._form.name):
                file = self._form.open(path, self._names, self._roles.coded)
                _ = file.schema.names  # which raises where a name is no UTF-8
            partition = {
                name: value for name, value in self._partitions.of(path).items() if name not in file.schema.names
            }
            schema = file.schema
            for name, value in partition.items():
                schema = schema.append(pa.field(name, value.type))
            filtered = () if self._where is None else columns_of(self._where)
            check_columns(self._roles, filtered, schema, path)
            expression = None if self._where is None else expression_of(self._where, schema, path)
            self._open[path] = file, Selection(expression, filtered, schema, partition)
            while len(self._open) > _OPEN_FILES:
                self._open.popitem(last=False)
        self._open.move_to_end(path)
        return self._open[path]
