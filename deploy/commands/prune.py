"""``sparserow prune``: removes old versions of a model."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options


def prune(
    model: Annotated[str, typer.Argument(help="Name of the model.", show_default=False)],
    *,
    root: options.ModelRoot,
    keep: Annotated[int, typer.Option(help="Number of newest versions that stay.")] = 3,
) -> None:
    """Remove old versions, except the newest, those that an alias names, and those that a rollback would return to.

    The files of publications that were killed more than a day ago are removed as well.
    """
    from ...proto.published.registry import ModelRegistry

    gone = ModelRegistry(root).prune(model, keep)
    typer.echo(f"removed {', '.join(f'{model}@{version}' for version in gone) or 'nothing'}")
