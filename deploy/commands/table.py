"""``sparserow table``: moves rows of a running cluster's tables to files and back, and removes rows and tables."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from . import options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...worker.api.session import Session

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", no_args_is_help=True)

TableName = Annotated[str, typer.Argument(help="NAMESPACE/NAME of the table.")]
Url = Annotated[str, typer.Argument(help="Path or URL of the file, such as s3://bucket/rows.parquet.")]
Coordinator = Annotated[str, typer.Option(help="HOST:PORT of the coordinator.")]
SWEPT_BY = ("older than evict_after_steps", "older than evict_after", "below evict_below_norm", "beyond the bound")

BatchRows = Annotated[int, typer.Option(help="Number of rows that are moved at a time.")]


@app.callback()
def table() -> None:
    """Export, import, sweep or drop rows of a table, or import the weights of a model trained elsewhere."""


@app.command("export")
def export_(
    table: TableName,
    url: Url,
    *,
    coordinator: Coordinator = options.DEFAULT_ADDRESS,
    batch_rows: BatchRows = 65536,
) -> None:
    """Write keys and weights of all rows to a .parquet or .safetensors file."""

    namespace, name = parts_of(table)
    with lone_session(coordinator, namespace) as session, _progress(f"export {table}", "rows") as progress:
        rows = session.table(name).export(url, batch_rows=batch_rows, progress=progress)
    typer.echo(f"wrote {rows:,} rows of {table} to {url}")


@app.command("import")
def import_(
    table: TableName,
    url: Url,
    *,
    coordinator: Coordinator = options.DEFAULT_ADDRESS,
    key_column: Annotated[str, typer.Option(help="Column or tensor of the keys.")] = "key",
    vector_column: Annotated[str, typer.Option(help="Column or tensor of the vectors.")] = "vector",
    batch_rows: BatchRows = 65536,
) -> None:
    """Assign the rows of a .parquet or .safetensors file of keys and vectors."""

    namespace, name = parts_of(table)
    with lone_session(coordinator, namespace) as session, _progress(f"import {table}", "rows") as progress:
        rows = session.table(name).load(
            url,
            key_column=key_column,
            vector_column=vector_column,
            batch_rows=batch_rows,
            progress=progress,
        )
    typer.echo(f"assigned {rows:,} rows of {url} to {table}")


@app.command("import-weights")
def import_weights_(
    namespace: Annotated[str, typer.Argument(help="The namespace of the tables.")],
    url: Url,
    *,
    coordinator: Coordinator = options.DEFAULT_ADDRESS,
    pairs: Annotated[
        list[str] | None,
        typer.Option("--entry", help="ENTRY=TABLE; may be repeated. Default: every entry with the name of a table."),
    ] = None,
    batch_rows: BatchRows = 65536,
) -> None:
    """Assign the embedding matrices of a state dict (.pt, .safetensors, .npz): row i becomes key i."""
    from ...proto.errors import not_allowed

    for pair in pairs or ():
        if not all(pair.partition("=")):
            raise not_allowed("--entry", pair, "ENTRY=TABLE")
    tables = {entry: name for entry, _, name in (pair.partition("=") for pair in pairs)} if pairs else None
    with lone_session(coordinator, namespace) as session, _progress(f"import {url}", "rows") as progress:
        rows = session.import_weights(url, tables=tables, batch_rows=batch_rows, progress=progress)
    for name, count in rows.items():
        typer.echo(f"assigned {count:,} rows to {namespace}/{name}")


@app.command("sweep")
def sweep_(
    table: Annotated[
        str | None, typer.Argument(help="NAMESPACE/NAME of the table. Default: every table with a policy.")
    ] = None,
    *,
    coordinator: Coordinator = options.DEFAULT_ADDRESS,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count the rows that would be removed, and remove none.")
    ] = False,
    deadline: Annotated[str, typer.Option(help="How long one table may take, such as 10min.")] = "1h",
) -> None:
    """Remove the rows that a table's policy no longer keeps, or count them, by rule."""
    from ...proto.control import ControlClient
    from ...proto.errors import FailedPrecondition
    from ...proto.options.units import format_bytes, parse_seconds

    seconds = parse_seconds(deadline)
    with ControlClient(coordinator) as client:
        known = {schema.full_name: schema for schema in client.list_tables()}
        wanted = [name for name, schema in known.items() if schema.policy.sweeps] if table is None else [table]
        if not wanted:
            typer.echo("no table has a policy that removes rows")
        for name in wanted:
            namespace, short_name = parts_of(name)
            if name in known and not known[name].policy.sweeps:
                raise FailedPrecondition(f"table {name}: its policy removes no rows (docs/admission.md)")
            reply = client.sweep_table(namespace, short_name, dry_run=dry_run, deadline_sec=seconds)
            rows, size = sum(freed.rows for freed in reply.freed), sum(freed.bytes for freed in reply.freed)
            said = "would remove" if dry_run else "removed"
            end = "" if reply.complete else " (stopped: a shard is leaving)"
            typer.echo(f"{name}: {said} {rows:,} of {reply.rows_seen:,} rows, {format_bytes(size)}{end}")
            for rule, freed in zip(SWEPT_BY, reply.freed, strict=True):
                if freed.rows:
                    typer.echo(f"  {rule}: {freed.rows:,} rows, {format_bytes(freed.bytes)}")


DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Force = Annotated[
    bool,
    typer.Option(
        "--force", help="Remove also while a job of the namespace has workers, whose calls then end as NotFound."
    ),
]


@app.command("drop")
def drop_(
    tables: Annotated[list[str], typer.Argument(help="NAMESPACE/NAME of each table; all of one namespace.")],
    *,
    coordinator: Coordinator = options.DEFAULT_ADDRESS,
    dry_run: DryRun = False,
    yes: Yes = False,
    force: Force = False,
) -> None:
    """Remove tables with all of their rows, for ever. Checkpoints and published versions stay."""
    from ...proto.errors import not_allowed

    namespaces, names = zip(*map(parts_of, tables), strict=True)
    if len(set(namespaces)) > 1:
        raise not_allowed("table drop", " ".join(tables), "tables of one namespace")
    drop(coordinator, namespaces[0], names, dry_run=dry_run, yes=yes, force=force)


def drop(
    coordinator: str, namespace: str, names: Sequence[str] | None, *, dry_run: bool, yes: bool, force: bool
) -> None:
    """Asks for confirmation, and removes tables of a namespace; ``names`` None removes the whole namespace."""
    import sys

    from ...proto.control import ControlClient
    from ...proto.errors import InvalidArgument
    from ...proto.options.units import format_bytes

    with ControlClient(coordinator) as client:
        found = client.drop_tables(namespace, names, dry_run=True, only_unused=not (dry_run or force))
        for table in found.tables:
            typer.echo(f"{namespace}/{table.name}: {table.rows:,} rows, {format_bytes(table.bytes)}")
        for job in found.jobs:
            typer.echo(f"job {job} has workers", err=True)
        what = f"namespace {namespace} with {len(found.tables)}" if names is None else f"{len(found.tables)}"
        what += " table" if len(found.tables) == 1 else " tables"
        if dry_run:
            typer.echo(f"would remove {what}")
            return
        if not yes and not sys.stdin.isatty():
            raise InvalidArgument("drop: there is no terminal for the confirmation; allowed: --yes, or --dry-run")
        if not yes and not typer.confirm(f"remove {what}, for ever?", err=True):
            typer.echo("nothing was removed", err=True)
            raise typer.Exit(1)
        client.drop_tables(namespace, names, only_unused=not force)
        typer.echo(f"removed {what}")


def parts_of(table: str) -> tuple[str, str]:
    from ...proto.errors import not_allowed

    namespace, slash, name = table.partition("/")
    if not (namespace and slash and name):
        raise not_allowed("table", table, "NAMESPACE/NAME")
    return namespace, name


@contextmanager
def lone_session(coordinator: str, namespace: str) -> Iterator[Session]:
    """Yields a session in a job of its own, so that no worker waits for another.

    An error that ends the command is shown at the shell alone: the cluster lists faults of workers.
    """
    from ...worker.api.connect import connect

    job = f"table-{os.getpid()}-{secrets.token_hex(4)}"
    session = connect(coordinator, namespace, job=job, staleness=None, rank=0, world_size=1)
    try:
        yield session
    except BaseException:
        session.core.end()  # the end of a with block would report the error to the cluster
        raise
    session.close()


@contextmanager
def _progress(title: str, unit: str) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.completed:,} " + unit))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as display:
        task = display.add_task(title, total=None)
        yield lambda done: display.update(task, completed=done)
