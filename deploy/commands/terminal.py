"""The console for tables of commands: a terminal has a width, a pipe has none."""

from __future__ import annotations

from rich.console import Console

_NO_BOUND = 4096  # columns of a pipe or file, where nothing is cut or wrapped


def tables_console() -> Console:
    """Returns a console on standard output; in a pipe or a file a table is as wide as its contents."""
    console = Console()
    return console if console.is_terminal else Console(width=_NO_BOUND)
