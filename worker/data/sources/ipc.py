"""Arrow files (the IPC file format, also called Feather): a part is a record batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..bad_line import BadLinePolicy
from ..storage import arrow_file_system
from .ipc_sizes import IpcSizes
from .part_bounds import check_size, checked
from .row_filter import Selection
from .tables import NumberedRows, count_by_reading, numbered_parts, numbered_rows


class IpcFile:
    """An open Arrow file. It is not mapped, since a map of a file that another process cuts short ends this process.

    Args:
        path: the path or URL of the file.
    """

    is_sequential = has_blanks = False

    def __init__(self, path: str) -> None:
        file_system, inside = arrow_file_system(path)
        self._source = file_system.open_input_file(inside)
        self._path = path
        self._readers: dict[tuple[str, ...], Any] = {}
        whole = pa.ipc.open_file(self._source)
        self.schema, self._batches = whole.schema, whole.num_record_batches
        self._sizes = IpcSizes(self._source, self.schema)
        size = self._sizes.dictionaries()
        check_size(f"{path}: its dictionaries", size.stored, 0, 0, size.inflated)

    def parts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns the rows of each record batch; a place is (number of the batch, rows before it)."""
        return numbered_parts(self._checked_rows(at, ()) for at in range(self._batches))

    def selected(
        self, rows: npt.NDArray[np.int64], places: npt.NDArray[np.int64], selection: Selection
    ) -> npt.NDArray[np.int64]:
        """Returns how many rows of each record batch pass."""
        return count_by_reading(self, rows, places, selection)

    def first(self, names: tuple[str, ...], policy: BadLinePolicy) -> NumberedRows | None:
        """Returns the rows of the first record batch; None when there is none."""
        return self.read(np.array([0, 0]), names, policy) if self._batches else None

    def read(self, place: npt.NDArray[np.int64], names: tuple[str, ...], policy: BadLinePolicy) -> NumberedRows:  # noqa: ARG002
        """Returns the rows of a record batch."""
        batch, before = int(place[0]), int(place[1])
        self._checked_rows(batch, names)
        table = pa.Table.from_batches([self._reader(names).get_batch(batch)])
        return numbered_rows(checked(self._path, table), before)

    def _checked_rows(self, at: int, names: tuple[str, ...]) -> int:
        """Returns the rows of a record batch, after checking what it becomes where some columns are read."""
        size = self._sizes.batch(at, [self.schema.get_field_index(name) for name in names])
        check_size(f"{self._path}: record batch {at}", size.stored, size.rows, len(names), size.inflated)
        return size.rows

    def _reader(self, names: tuple[str, ...]) -> Any:
        """Returns a reader of some columns."""
        if names not in self._readers:
            fields = sorted(self.schema.get_field_index(name) for name in names)
            options = pa.ipc.IpcReadOptions(included_fields=fields)
            self._readers[names] = pa.ipc.open_file(self._source, options=options)
        return self._readers[names]


class IpcFormat:
    """The format of Arrow files."""

    name = "Arrow"

    def open(self, path: str, names: Sequence[str], coded: Sequence[str]) -> IpcFile:  # noqa: ARG002 - others need them
        """Opens a file."""
        return IpcFile(path)
