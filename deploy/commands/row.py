"""``sparserow row``: shows one row, in training and in serving."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options


def row(
    table: Annotated[str, typer.Argument(help="NAMESPACE/NAME of the table.", show_default=False)],
    key: Annotated[
        str, typer.Argument(help="Key of the row: an integer, or a string with --hash.", show_default=False)
    ],
    *,
    coordinator: Annotated[str, typer.Option(help="HOST:PORT of the training cluster.")] = options.DEFAULT_ADDRESS,
    serving: Annotated[
        str | None, typer.Option(help="HOST:PORT of serving processes, with commas. Default: only training is shown.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="NAME[@ALIAS|@VERSION]. Default: the only one served.")] = None,
    hashed: Annotated[bool, typer.Option("--hash", help="The key is a string, hashed as in training.")] = False,
    modulo: options.Modulo = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show slot, shard and version, and compare training with serving.")
    ] = False,
) -> None:
    """Show a row of a table; with --explain also where it is, its version, and training against serving."""
    from ...proto.errors import InvalidArgument
    from ...serving.lookup import key_of_text
    from ..observe.row_explanation import explain_row

    if model is not None and serving is None:
        raise InvalidArgument("--model: has no effect without --serving, whose model it names")
    explained = explain_row(
        coordinator, table, key_of_text(key, hashed=hashed, modulo=modulo), serving=serving, model=model
    )
    typer.echo(f"training: {explained.training_line}")
    if explained.serving_line is not None:
        typer.echo(f"serving:  {explained.serving_line}")
    if explain:
        for name, value in explained.facts.items():
            typer.echo(f"{name}: {value}")
