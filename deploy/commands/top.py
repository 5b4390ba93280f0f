"""``sparserow top``: shows the screen of ``sparserow status`` and keeps it up to date."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options


def top(
    *,
    coordinator: Annotated[str, typer.Option(help="HOST:PORT of the coordinator.")] = options.DEFAULT_ADDRESS,
    every: Annotated[str, typer.Option(help="Time between two readings, such as 1s; at least 0.1s.")] = "1s",
    namespace: Annotated[
        str | None, typer.Option(help="Namespace whose tables, jobs, faults and keys are shown. Default: all.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Show one screen after two readings, and end.")] = False,
) -> None:
    """Watch a cluster in the terminal; q or Ctrl-C ends it. It waits for a coordinator that is away.

    Arrows, page up, page down, home and end scroll; so do k, j, b, the space bar, g and G.
    """
    import sys

    from rich.console import Console

    from ...proto.control import ControlClient
    from ...proto.errors import InvalidArgument, not_allowed
    from ...proto.options.units import parse_seconds
    from ..observe.live_screen import watch

    seconds = parse_seconds(every)
    if not 0.1 <= seconds <= 3600:
        raise not_allowed("--every", every, "0.1s to 1h")
    console = Console()
    if not once and not console.is_terminal:
        raise InvalidArgument("top: needs a terminal; without one use --once, or sparserow status")
    with ControlClient(coordinator, deadline_sec=5.0) as client:
        watch(client, console, sys.stdin, every_sec=seconds, once=once, namespace=namespace)
