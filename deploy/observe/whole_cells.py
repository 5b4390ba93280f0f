"""A table whose cells stay whole: where it is wider than the screen, its columns continue in a second table below.

Addresses, names and numbers are never broken; columns of free text wrap between words.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_WIDE = 1 << 16
_TEXT_WIDTH = 24  # least width of a column of free text that is long enough


class WholeCells:
    """Rows under columns; the first column is repeated where the table continues.

    Args:
        title: the title above the table; empty for none.
        columns: the names of the columns, at least one.
        left: the columns that are aligned to the left.
        prose: the columns of free text.
    """

    def __init__(
        self, title: str, columns: Sequence[str], *, left: Collection[str] = (), prose: Collection[str] = ()
    ) -> None:
        self._title, self._columns, self._left, self._prose = title, tuple(columns), left, prose
        self._rows: list[tuple[tuple[Text, ...], str]] = []

    @property
    def row_count(self) -> int:
        """The number of rows so far."""
        return len(self._rows)

    def add_row(self, *cells: str, style: str = "") -> None:
        """Adds a row with a cell for each column; cells are plain text without markup."""
        self._rows.append((tuple(map(Text, cells)), style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the table, or the tables into which it is split."""
        places = list(range(1, len(self._columns)))
        if not places:
            yield self._table((0,), self._title)
            return
        title = self._title
        while places:
            count = len(places)
            while count > 1 and self._width(console, options, (0, *places[:count])) > options.max_width:
                count -= 1
            yield self._table((0, *places[:count]), title)
            places, title = places[count:], ""

    def _width(self, console: Console, options: ConsoleOptions, places: Sequence[int]) -> int:
        table = self._table(places, "")
        for column in table.columns:
            if not column.no_wrap:
                column.max_width = _TEXT_WIDTH
        return Measurement.get(console, options.update(width=_WIDE, max_width=_WIDE), table).maximum

    def _table(self, places: Sequence[int], title: str) -> Table:
        table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for place in places:
            name = self._columns[place]
            is_prose = name in self._prose
            table.add_column(
                name, justify="left" if name in self._left else "right", no_wrap=not is_prose, overflow="fold"
            )
        for cells, style in self._rows:
            table.add_row(*(cells[place] for place in places), style=style)
        return table
