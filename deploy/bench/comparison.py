"""``bench compare``: which figures of two files differ by more than they differ from run to run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ...proto.errors import DataLoss, NotFound
from .suite import FORMAT, BenchmarkRun, Suite, Summary, summed_up

LEAST_MOVE = 0.05


@dataclass(frozen=True)
class Move:
    """A figure in both files.

    Attributes:
        before, after: the figure in the first file and in the second.
        change: the relative change of the ratio to the reference; of the value where there is no ratio.
        has_moved: whether the change is more than 5 %, and more than the spread of either file.
    """

    before: Summary
    after: Summary
    change: float
    has_moved: bool

    @property
    def is_better(self) -> bool:
        """Whether the change is one for the better."""
        return (self.change > 0) == self.after.higher_is_better


def figures_of(path: Path) -> list[Summary]:
    """Returns the figures of a file that ``bench all`` or another benchmark has written with ``--json``.

    Raises:
        NotFound: there is no such file.
        DataLoss: it has no figures.
    """
    if not path.is_file():
        raise NotFound(f"{path}: there is no such file; `sparserow bench all --json FILE` writes one")
    try:
        document = json.loads(path.read_text())
        if isinstance(document, dict) and document.get("format") == FORMAT:
            return summed_up(Suite.read(path).runs)
        if not isinstance(document, list):
            raise ValueError("a mapping of another kind")
        return summed_up([BenchmarkRun("", 0, 0.0, [{**figure} for figure in document])])
    except (ValueError, TypeError, KeyError) as error:
        raise DataLoss(f"{path}: is not a file of figures: {error!r}") from error


def compared(before: Sequence[Summary], after: Sequence[Summary]) -> list[Move]:
    """Returns the figures that both have, those that moved first, the largest changes first."""
    known = {(each.benchmark, each.metric): each for each in before}
    alone = {each.metric: each for each in before}
    moves = []
    for each in after:
        other = known.get((each.benchmark, each.metric)) or alone.get(each.metric)
        if other is None:
            continue
        is_ratio = each.ratio is not None and other.ratio is not None
        old, new = (other.ratio, each.ratio) if is_ratio else (other.median, each.median)
        change = (new - old) / abs(old) if old and new is not None else 0.0
        moves.append(Move(other, each, change, abs(change) > max(LEAST_MOVE, other.spread, each.spread)))
    return sorted(moves, key=lambda move: (not move.has_moved, -abs(move.change)))


def lacking(before: Sequence[Summary], after: Sequence[Summary]) -> list[str]:
    """Returns the figures that one of the files has alone."""
    names, others = ({each.metric for each in figures} for figures in (before, after))
    return sorted(names ^ others)


def show_moves(moves: Sequence[Move], console: Console) -> None:
    """Prints figures of two files as a table."""
    table = Table(title="figures that moved")
    for name in ("metric", "before", "after", "change"):
        table.add_column(name, justify="left" if name == "metric" else "right")
    for move in moves:
        is_ratio = move.before.ratio is not None and move.after.ratio is not None
        pair = (move.before.ratio, move.after.ratio) if is_ratio else (move.before.median, move.after.median)
        unit = "of its reference" if is_ratio else move.after.unit
        color = "green" if move.is_better else "red"
        shown = [f"{value:,.3f} {unit}" for value in pair if value is not None]
        table.add_row(move.after.metric, *shown, f"[{color}]{move.change:+.1%}[/]")
    console.print(table)
