"""``sparserow query``: shows rows of a served model by key."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from . import options


def query(
    table: Annotated[str, typer.Argument(help="Table of the model.", show_default=False)],
    keys: Annotated[
        list[str] | None, typer.Argument(help="Keys: integers, or strings with --hash.", show_default=False)
    ] = None,
    *,
    serving: options.Serving = options.DEFAULT_SERVING,
    model: Annotated[str | None, typer.Option(help="NAME[@ALIAS|@VERSION]. Default: the only one served.")] = None,
    feature: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE: the key that a feature of the version makes of a value. Can be repeated."),
    ] = None,
    hashed: Annotated[
        bool, typer.Option("--hash", help="Keys are strings, hashed as in training; for versions without features.")
    ] = False,
    modulo: options.Modulo = None,
    deadline_ms: Annotated[
        int, typer.Option(min=1, help="Time after which the result is partial, in milliseconds.")
    ] = 1000,
) -> None:
    """Show rows as the serving processes have them. Exit code 1 when a shard did not answer."""
    from ...proto.errors import InvalidArgument
    from ...serving.client.client import ServingClient
    from ...serving.lookup import key_of_text

    asked = [(key, key_of_text(key, hashed=hashed, modulo=modulo)) for key in keys or ()]
    named = [each.partition("=") for each in feature or ()]
    if not asked and not named:
        raise InvalidArgument("query: there is nothing to look up; give KEYS, or --feature NAME=VALUE")
    wrong = next((name for name, is_pair, _ in named if not name or not is_pair), None)
    if wrong is not None:
        raise InvalidArgument(f"--feature: {wrong!r} is not allowed; allowed: NAME=VALUE")
    with contextlib.ExitStack() as clients:
        client = clients.enter_context(ServingClient(serving, model=model))
        if named:  # the keys and their rows are of one version, though an alias may move in between
            client = clients.enter_context(ServingClient(serving, model=f"{client.model}@{client.version}"))
        for name, _, value in named:
            asked.append((f"{name}={value}", int(client.make_keys(name, [value])[0])))
        found = client.lookup(table, [key for _, key in asked], deadline_ms=deadline_ms)
        for i, (shown, _) in enumerate(asked):
            state = "" if found.found[i] else "  (default row)"
            if not found.answered[i]:
                typer.echo(f"{shown}: not answered")
                continue
            values = " ".join(f"{value:.6g}" for value in found.rows[i])
            typer.echo(f"{shown}: {values}{state}")
        typer.echo(f"model {client.model} version {found.version}")
        if hashed and not found.found.all():
            typer.echo(
                "sparserow: no row has the key of a text; a version with features makes its keys by them: --feature "
                "NAME=VALUE",
                err=True,
            )
        if found.is_partial:
            raise found.errors[0]
