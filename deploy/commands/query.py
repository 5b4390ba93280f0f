"""``sparserow query``: shows rows of a served model by key."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options


def query(
    table: Annotated[str, typer.Argument(help="Table of the model.", show_default=False)],
    keys: Annotated[list[str], typer.Argument(help="Keys: integers, or strings with --hash.", show_default=False)],
    *,
    serving: options.Serving = options.DEFAULT_SERVING,
    model: Annotated[str | None, typer.Option(help="NAME[@ALIAS|@VERSION]. Default: the only one served.")] = None,
    hashed: Annotated[bool, typer.Option("--hash", help="Keys are strings, hashed as in training.")] = False,
    modulo: options.Modulo = None,
    deadline_ms: Annotated[
        int, typer.Option(min=1, help="Time after which the result is partial, in milliseconds.")
    ] = 1000,
) -> None:
    """Show rows as the serving processes have them. Exit code 1 when a shard did not answer."""
    from ...serving.client.client import ServingClient
    from ...serving.lookup import key_of_text

    numbers = [key_of_text(key, hashed=hashed, modulo=modulo) for key in keys]
    with ServingClient(serving, model=model) as client:
        found = client.lookup(table, numbers, deadline_ms=deadline_ms)
        for i, key in enumerate(keys):
            state = "" if found.found[i] else "  (default row)"
            if not found.answered[i]:
                typer.echo(f"{key}: not answered")
                continue
            values = " ".join(f"{value:.6g}" for value in found.rows[i])
            typer.echo(f"{key}: {values}{state}")
        typer.echo(f"model {client.model} version {found.version}")
        if found.is_partial:
            raise found.errors[0]
