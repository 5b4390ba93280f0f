"""``sparserow alias``: lets an alias name a version, or gives it a canary."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options


def alias(
    model: Annotated[str, typer.Argument(help="NAME@ALIAS; NAME alone means NAME@live.", show_default=False)],
    version: Annotated[int, typer.Argument(help="A version of the model.", show_default=False)],
    *,
    root: options.ModelRoot,
    canary: Annotated[
        float | None,
        typer.Option(help="Share of routing keys in (0, 1] that the version answers; the others are unchanged."),
    ] = None,
) -> None:
    """Move an alias to a version, or have the version answer a share of its routing keys."""
    from ...proto.published.model_names import parse_model
    from ...proto.published.registry import ModelRegistry

    name, which = parse_model(model)
    registry = ModelRegistry(root)
    if canary is None:
        registry.point(name, which, version)
        typer.echo(f"{name}@{which} is version {version}")
    else:
        moved = registry.canary(name, which, version, canary)
        typer.echo(f"{name}@{which} is version {moved.version}, and version {version} for {canary:.1%} of routing keys")
