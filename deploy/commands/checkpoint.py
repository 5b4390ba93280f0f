"""``sparserow checkpoint``: saves and restores the rows of a running cluster, and inspects checkpoints."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from ...proto.checkpoint.urls import absolute
from . import options

if TYPE_CHECKING:
    from rich.table import Table

    from ...proto import control_pb2 as pb
    from ...proto.checkpoint.manifest import Manifest

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", no_args_is_help=True)

Url = Annotated[str, typer.Argument(help="Folder of the checkpoints: a path, or a URL (s3://bucket/x).")]
Coordinator = Annotated[str, typer.Option(help="HOST:PORT of the coordinator.")]
Name = Annotated[str | None, typer.Option(help="Name of a checkpoint, such as save-000003. Default: the newest.")]

_SAVE_DEADLINE_SEC = 3600.0
_WAIT_SEC = 0.5


@app.callback()
def checkpoint() -> None:
    """Save and restore the rows of a cluster; list, verify, inspect and remove checkpoints."""


@app.command("save")
def save_(
    url: Url,
    *,
    coordinator: Coordinator = options.DEFAULT_ADDRESS,
    keep: Annotated[int, typer.Option(help="Number of newest checkpoints that stay after the save; 0: all.")] = 0,
    full_every: Annotated[
        int, typer.Option(help="One save in full_every holds all rows, the others the changed rows; 1: each holds all.")
    ] = 1,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read the checkpoint back afterwards, and compare checksums.")
    ] = False,
) -> None:
    """Save all tables as they are at one instant, after whole commits; jobs continue meanwhile."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from ...proto import control_pb2 as pb
    from ...proto.control import ControlClient
    from ...proto.errors import error_of, not_allowed

    if keep < 0 or full_every < 1:
        raise not_allowed("--keep, --full-every", (keep, full_every), "--keep >= 0 and --full-every >= 1")
    folder = absolute(url)
    columns = (SpinnerColumn(), TextColumn("save: {task.completed:,} bytes"), TimeElapsedColumn())
    with ControlClient(coordinator) as control:
        name = control.begin_save(folder, None, deadline_sec=_SAVE_DEADLINE_SEC).name
        control.enter_save(
            pb.EnterSaveRequest(url=folder, name=name, keep=keep, full_every=full_every),
            None,
            deadline_sec=_SAVE_DEADLINE_SEC,
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as display:
            task = display.add_task("save", total=None)
            while (reply := control.get_save(folder, name, wait_sec=_WAIT_SEC)).phase != pb.SAVED:
                if reply.phase == pb.FAILED:
                    raise error_of(reply.problem_code, f"save: {reply.problem}")
                display.update(task, completed=reply.bytes)
    typer.echo(f"saved {reply.rows:,} rows to {folder}/{name}")
    if verify:
        _verify(folder, name)


@app.command("restore")
def restore_(
    url: Url,
    *,
    name: Name = None,
    coordinator: Coordinator = options.DEFAULT_ADDRESS,
    tables: Annotated[
        list[str] | None,
        typer.Option("--table", help="NAMESPACE/NAME in the checkpoint; may be repeated. Default: all."),
    ] = None,
    renames: Annotated[
        list[str] | None, typer.Option("--rename", help="NAMESPACE/OLD=NAMESPACE/NEW; may be repeated.")
    ] = None,
    accept: Annotated[
        list[str] | None,
        typer.Option(
            help="What may differ of a table: NAMESPACE/NAME.KEY, where KEY is dim, dtype or optimizer, and * names "
            "every table; may be repeated."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Restore a checkpoint on a cluster without running jobs, whatever number of shards wrote it. The command shows
    what the checkpoint has by namespace, and asks. A job restores its own namespace (--resume, session.restore).
    """
    from ...proto import control_pb2 as pb
    from ...proto.checkpoint.accepted import check_accepted
    from ...proto.control import ControlClient
    from ...proto.errors import InvalidArgument, not_allowed

    pairs = [rename.partition("=") for rename in renames or ()]
    for pair in pairs:
        if not all(pair):
            raise not_allowed("--rename", "".join(pair), "NAMESPACE/OLD=NAMESPACE/NEW")
    check_accepted(accept or (), "--accept")
    request = pb.RestoreRequest(
        url=absolute(url),
        name=name or "",
        tables=tables or [],
        renames=[pb.TableRename(saved=saved, name=present) for saved, _, present in pairs],
        accept=accept or [],
    )
    if not yes:
        if not sys.stdin.isatty():
            raise InvalidArgument("restore: there is no terminal for the confirmation; allowed: --yes")
        for line in _replaced(request):
            typer.echo(line)
        if not typer.confirm("replace these rows of the cluster?", err=True):
            raise typer.Exit(1)
    with ControlClient(coordinator) as control:
        reply = control.restore(request, None, deadline_sec=_SAVE_DEADLINE_SEC)
    where = f" in the namespaces {', '.join(reply.namespaces)}" if reply.namespaces else ""
    typer.echo(f"restored {reply.rows:,} rows of {absolute(url)}/{reply.name}{where}")


def _replaced(request: pb.RestoreRequest) -> Iterator[str]:
    """Yields a line for each namespace of the cluster, with the tables and rows that it gets."""
    from ...proto.checkpoint import manifest as files
    from ...proto.checkpoint.folder import Folder

    manifest = files.read_manifest(Folder(request.url), request.name or None)
    request.name = manifest.name  # what is shown is what is restored
    present = {rename.saved: rename.name for rename in request.renames}
    wanted = {*request.tables, *present} or {table.schema.full_name for table in manifest.tables}
    tables: dict[str, list[str]] = {}
    for table in manifest.tables:
        if (saved := table.schema.full_name) in wanted:
            namespace, _, name = present.get(saved, saved).partition("/")
            tables.setdefault(namespace, []).append(f"{name} ({table.rows:,} rows)")
    for namespace, found in sorted(tables.items()):
        yield f"namespace {namespace}: {', '.join(sorted(found))}"


@app.command("list")
def list_(url: Url) -> None:
    """Show the checkpoints in a folder, the oldest first."""

    from ...proto.checkpoint import manifest as files
    from ...proto.checkpoint.best import best_in
    from ...proto.checkpoint.folder import Folder
    from .terminal import tables_console

    folder = Folder(url)
    table = _table("checkpoint", "created", "step", "rows", "MiB", "adds to", "shards", "workers")
    names = files.list_names(folder)
    for name in names:
        found = files.read_manifest(folder, name)
        table.add_row(
            name,
            found.created,
            "-" if found.step < 0 else str(found.step),
            f"{found.rows:,}",
            f"{found.size / 2**20:,.1f}",
            found.base or "-",
            str(found.shards),
            str(len(found.workers)),
        )
    best = best_in(folder)
    if names:
        tables_console().print(table)
        if best is not None and best.name in names:
            step = f", step {best.step}" if best.step else ""
            typer.echo(f"{best.name} is the best: {best.metric} {best.value:.6g} in epoch {best.epoch}{step}")
    else:
        typer.echo(f"no checkpoint in {url}")


@app.command("verify")
def verify_(url: Url, *, name: Name = None) -> None:
    """Read every file of a checkpoint, and compare sizes and checksums; the first file that differs is named.

    The checkpoint that was last read whole is kept when others are removed.
    """
    _verify(url, name)


def _verify(url: str, name: str | None) -> None:
    from ...proto.checkpoint import manifest as files
    from ...proto.checkpoint.folder import Folder
    from ...proto.errors import SparserowError

    folder = Folder(url)
    chain = files.read_chain(folder, name)
    size = files.verify(folder, chain)
    try:
        files.note_read_whole(folder, chain[-1].name)
    except (SparserowError, NotImplementedError) as error:  # the store may be read-only
        typer.echo(
            f"saves may remove {chain[-1].name}, because the note that it was read whole could not be written: {error}"
        )
    count = sum(len(found.files()) for found in chain)
    typer.echo(f"{chain[-1].name}: {count} files, {size:,} bytes: all as they were written")


@app.command("inspect")
def inspect_(url: Url, *, name: Name = None) -> None:
    """Show what a checkpoint holds: tables, jobs, workers."""

    from ...proto.checkpoint import manifest as files
    from ...proto.checkpoint.folder import Folder
    from .terminal import tables_console

    found = files.read_manifest(Folder(url), name)
    console = tables_console()
    console.print(
        f"{found.name} of {found.created}: cluster {found.cluster_id:x}, {found.shards} shards, "
        f"{found.slot_count} slots, lineage {found.lineage}",
        highlight=False,
    )
    if found.base:
        console.print(
            f"adds what changed to {found.base}; {found.chain} others are needed to restore it", highlight=False
        )
    console.print(_tables_of(found))
    for job in found.jobs:
        kind = "asynchronous" if job.staleness is None else f"staleness {job.staleness}"
        console.print(f"job {job.name}: {kind}, step {job.step}, {len(job.sequences)} workers", highlight=False)
    for worker in found.workers:
        console.print(f"state of rank {worker.rank}: {worker.file}, {worker.bytes:,} bytes", highlight=False)


@app.command("prune")
def prune_(url: Url, *, keep: Annotated[int, typer.Option(help="Number of newest checkpoints that stay.")] = 3) -> None:
    """Remove all but the newest checkpoints of a folder, the one that was read whole last, and the best of a run."""
    from ...proto.checkpoint import manifest as files
    from ...proto.checkpoint.folder import Folder

    gone = files.prune(Folder(url), keep)
    typer.echo(f"removed {', '.join(gone)}" if gone else "nothing to remove")


def _tables_of(found: Manifest) -> Table:
    """Returns the table of tables; a table's share of a shared file's bytes is that of its rows."""
    table = _table("table", "rows", "dim", "dtype", "optimizer", "files", "MiB")
    rows_in = Counter[str]()
    for entry in found.tables:
        rows_in.update({part.file: part.rows for part in entry.parts})
    for entry in found.tables:
        schema = entry.schema
        table.add_row(
            schema.full_name,
            f"{entry.rows:,}",
            str(schema.dim),
            schema.dtype,
            type(schema.optimizer).__name__,
            str(len(entry.parts)),
            f"{sum(part.bytes * part.rows / rows_in[part.file] for part in entry.parts) / 2**20:,.1f}",
        )
    return table


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table
