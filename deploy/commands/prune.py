"""``sparserow prune``: removes old versions of a model."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options


def prune(
    model: Annotated[str, typer.Argument(help="Name of the model.", show_default=False)],
    *,
    root: options.ModelRoot,
    keep: Annotated[int, typer.Option(help="How many of the newest versions stay.")] = 3,
) -> None:
    """Remove versions that are not among the newest, nor named by an alias, nor what one would roll back to."""
    from ...proto.published.registry import ModelRegistry

    gone = ModelRegistry(root).prune(model, keep)
    typer.echo(f"removed {', '.join(f'{model}@{version}' for version in gone) or 'nothing'}")
