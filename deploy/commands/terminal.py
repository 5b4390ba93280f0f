"""Where commands write tables: a terminal has a width, a pipe has none."""

from __future__ import annotations

from rich.console import Console

_NO_BOUND = 4096  # columns of a pipe: nothing is cut or broken there


def tables_console() -> Console:
    """A console on standard output; into a pipe or a file a table has the width of what is in it."""
    console = Console()
    return console if console.is_terminal else Console(width=_NO_BOUND)
