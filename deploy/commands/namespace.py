"""``sparserow namespace``: lists and drops the namespaces of a running cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options
from .table import Coordinator, DryRun, Force, Yes, drop

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", no_args_is_help=True)


@app.callback()
def namespace() -> None:
    """List the tables of namespaces, or drop a namespace."""


@app.command("list")
def list_(*, coordinator: Coordinator = options.DEFAULT_ADDRESS) -> None:
    """List the namespaces that have tables, each with its tables."""
    from ...proto.control import ControlClient

    with ControlClient(coordinator) as client:
        tables: dict[str, list[str]] = {}
        for schema in client.list_tables():
            tables.setdefault(schema.namespace, []).append(schema.name)
    for name, names in tables.items():
        typer.echo(f"{name}: {', '.join(names)}")


@app.command("drop")
def drop_(
    name: Annotated[str, typer.Argument(help="The namespace.")],
    *,
    coordinator: Coordinator = options.DEFAULT_ADDRESS,
    dry_run: DryRun = False,
    yes: Yes = False,
    force: Force = False,
) -> None:
    """Remove all tables of a namespace, and its name. Checkpoints and published versions stay."""
    drop(coordinator, name, None, dry_run=dry_run, yes=yes, force=force)
