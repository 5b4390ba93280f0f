"""What each benchmark's command does about its files, and about figures that miss their limits."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ...proto.errors import InvalidArgument

if TYPE_CHECKING:
    from ..bench.harness import Figure


def report_missed(figures: Iterable[Figure], *, strict: bool) -> None:
    """Prints a line for each figure that misses its limit; ends with status 1 then, where that is asked for."""
    from ..bench.harness import line_of

    missed = [figure for figure in figures if figure.passes is False]
    for figure in missed:
        typer.echo(f"missed: {line_of(figure)}")
    if missed and strict:
        raise typer.Exit(1)


def check_folder(option: str, path: Path | None) -> None:
    """Raises InvalidArgument where the folder of the file of an option does not exist."""
    if path is not None and not path.parent.is_dir():
        raise InvalidArgument(f"{option} {path}: the folder of the file does not exist; create it first")
