"""``sparserow list``: published models, their versions and aliases."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options


def list(  # noqa: A001 - the command's name
    model: Annotated[str | None, typer.Argument(help="Name of a model. Default: all.", show_default=False)] = None,
    *,
    root: options.ModelRoot,
) -> None:
    """Show versions and aliases of published models."""
    from rich.table import Table

    from ...proto.config.units import format_bytes
    from ...proto.published.registry import ModelRegistry
    from .terminal import tables_console

    registry = ModelRegistry(root)
    if model is not None:
        registry.resolve(model, str((registry.versions(model) or [0])[-1]))  # says which models there are
    console = tables_console()
    lines = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("model", "version", "aliases", "created", "rows", "size", "program", "card"):
        lines.add_column(column, justify="right" if column in ("version", "rows", "size") else "left")
    for name in [model] if model is not None else registry.models():
        aliases = registry.aliases(name)
        for version in registry.versions(name):
            manifest = registry.manifest(name, version)
            named = [alias for alias, entry in aliases.items() if entry.version == version]
            named += [
                f"{alias} ({entry.canary_share:.0%})" for alias, entry in aliases.items() if entry.canary == version
            ]
            lines.add_row(
                name,
                str(version),
                ", ".join(named) or "-",
                manifest.created,
                f"{manifest.rows:,}",
                format_bytes(manifest.size),
                "yes" if manifest.program is not None else "no",
                ", ".join(f"{key} {value}" for key, value in manifest.card.items()) or "-",
            )
    console.print(lines if lines.row_count else f"no models at {root}")
