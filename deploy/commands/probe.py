"""``sparserow probe``: measures how long a write in training takes to be served."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options


def probe(
    table: Annotated[str, typer.Argument(help="NAMESPACE/NAME of the table.", show_default=False)],
    *,
    coordinator: Annotated[str, typer.Option(help="HOST:PORT of the training cluster.")] = options.DEFAULT_ADDRESS,
    serving: options.Serving = options.DEFAULT_SERVING,
    model: Annotated[str | None, typer.Option(help="NAME[@ALIAS|@VERSION]. Default: the only one served.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of marked rows, written one after another.")] = 20,
    deadline: Annotated[str, typer.Option(help="Longest time for a row to be served, such as 10s.")] = "10s",
) -> None:
    """Write marked rows in training, look them up until they are served, and delete them again."""
    from ...proto.options.units import parse_seconds
    from ...serving.client.client import ServingClient
    from ..observe.freshness_probe import probe_freshness
    from .table import lone_session, parts_of

    namespace, name = parts_of(table)
    with (
        lone_session(coordinator, namespace) as session,
        ServingClient(serving, model=model) as client,
    ):
        seconds = probe_freshness(session, client, name, count=count, deadline_sec=parse_seconds(deadline))
    p50, worst = seconds[len(seconds) // 2], seconds[-1]
    typer.echo(f"{count} writes to {table} were served after {p50 * 1e3:.0f} ms (p50), {worst * 1e3:.0f} ms at most")
