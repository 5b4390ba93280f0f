"""ORC files: a part is a stripe."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import orc

from ..bad_line import BadLinePolicy
from ..storage import arrow_file_system
from .part_bounds import checked
from .row_filter import Selection
from .tables import NumberedRows, count_by_reading, narrow_column, numbered_parts, numbered_rows


class OrcFile:
    """An open ORC file.

    Args:
        path: the path or URL of the file.
    """

    is_sequential = has_blanks = False

    def __init__(self, path: str) -> None:
        file_system, inside = arrow_file_system(path)
        self._path = path
        self._file = orc.ORCFile(file_system.open_input_file(inside))
        self.schema = self._file.schema

    def parts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns the rows of each stripe; a place is (number of the stripe, rows before it).

        A file with several stripes does not give the rows of each, so one column is read.
        """
        stripes = self._file.nstripes
        if stripes == 1:
            counts = [self._file.nrows]
        else:
            narrow = list(narrow_column(self.schema))
            counts = [self._file.read_stripe(at, columns=narrow).num_rows for at in range(stripes)]
        return numbered_parts(counts)

    def selected(
        self, rows: npt.NDArray[np.int64], places: npt.NDArray[np.int64], selection: Selection
    ) -> npt.NDArray[np.int64]:
        """Returns how many rows of each stripe pass."""
        return count_by_reading(self, rows, places, selection)

    def first(self, names: tuple[str, ...], policy: BadLinePolicy) -> NumberedRows | None:
        """Returns the rows of the first stripe; None when there is none."""
        return self.read(np.array([0, 0]), names, policy) if self._file.nstripes else None

    def read(self, place: npt.NDArray[np.int64], names: tuple[str, ...], policy: BadLinePolicy) -> NumberedRows:  # noqa: ARG002
        """Returns the rows of a stripe."""
        stripe, before = int(place[0]), int(place[1])
        table = pa.Table.from_batches([self._file.read_stripe(stripe, columns=list(names))])
        return numbered_rows(checked(self._path, table), before)


class OrcFormat:
    """The format of ORC files."""

    name = "ORC"

    def open(self, path: str, names: Sequence[str], coded: Sequence[str]) -> OrcFile:  # noqa: ARG002 - others need them
        """Opens a file."""
        return OrcFile(path)
