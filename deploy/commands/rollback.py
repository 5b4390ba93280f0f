"""``sparserow rollback``: lets an alias name the version that it named before."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options


def rollback(
    model: Annotated[str, typer.Argument(help="NAME@ALIAS; NAME alone means NAME@live.", show_default=False)],
    *,
    root: options.ModelRoot,
) -> None:
    """Let an alias name the version that it named before."""
    from ...proto.published.model_names import parse_model
    from ...proto.published.registry import ModelRegistry

    name, which = parse_model(model)
    typer.echo(f"{name}@{which} is version {ModelRegistry(root).rollback(name, which).version}")
