"""``sparserow list``: shows published models, their versions and aliases."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options


def list(  # noqa: A001 - the name of the command
    model: Annotated[str | None, typer.Argument(help="Name of a model. Default: all.", show_default=False)] = None,
    *,
    root: options.ModelRoot,
    namespace: Annotated[
        str | None, typer.Option(help="Namespace of the training cluster whose tables were published. Default: all.")
    ] = None,
) -> None:
    """Show versions and aliases of published models."""
    from ...proto.options.units import format_bytes
    from ...proto.published.registry import ModelRegistry
    from ..observe.whole_cells import WholeCells
    from .terminal import tables_console

    registry = ModelRegistry(root)
    if model is not None:
        registry.resolve(model, str((registry.versions(model) or [0])[-1]))  # raises an error with the existing models
    console = tables_console()
    columns = ("model", "version", "aliases", "created", "rows", "size", "program", "card")
    left = [column for column in columns if column not in ("version", "rows", "size")]
    lines = WholeCells("", columns, left=left, prose=("aliases", "card"))
    for name in [model] if model is not None else registry.models():
        aliases = registry.aliases(name)
        for version in registry.versions(name):
            manifest = registry.manifest(name, version)
            if namespace is not None and manifest.namespace != namespace:
                continue
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
    whose = "" if namespace is None else f" of namespace {namespace}"
    console.print(lines if lines.row_count else f"no models{whose} at {root}")
