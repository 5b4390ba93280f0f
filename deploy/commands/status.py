"""``sparserow status``: one screen about a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from . import options

if TYPE_CHECKING:
    from rich.table import Table

    from ...proto import control_pb2 as pb


def status(
    *,
    coordinator: Annotated[str, typer.Option(help="HOST:PORT of the coordinator.")] = options.DEFAULT_ADDRESS,
) -> None:
    """Show a cluster: its shards, tables and jobs. Exit code 1 when it cannot be reached or is not ready."""
    from rich.console import Console

    from ...proto.control import ControlClient

    with ControlClient(coordinator) as client:
        reply = client.status()
    console = Console()
    state = "[green]ready[/green]" if reply.ready else f"[red]not ready[/red]: {reply.problem}"
    console.print(f"cluster {reply.cluster_id:016x} at {coordinator}: {state}")
    console.print(f"{reply.slot_count} slots, route epoch {reply.route_epoch}")
    console.print(_shards(reply))
    if any(shard.HasField("tier") for shard in reply.shards):
        console.print(*_tiers(reply), sep="\n")
    console.print(_tables(reply) if reply.tables else "no tables")
    console.print(_jobs(reply) if reply.jobs else "no jobs")
    if not reply.ready:
        raise typer.Exit(1)


_TEXT_COLUMNS = frozenset({"state", "data", "table", "dtype", "optimizer", "job", "staleness", "problem"})


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in _TEXT_COLUMNS else "right", overflow="fold")
    return table


def _shards(reply: pb.GetStatusReply) -> Table:
    from ...proto import control_pb2 as pb

    problems = any(shard.problem for shard in reply.shards)
    columns = ("shard", "state", "data", "pid", "slots", "rows", "memory", "requests", "clients")
    came_back = any(shard.restores for shard in reply.shards)
    recovery_columns = ("restored", "lost") if came_back else ()
    table = _table("shards", *columns, *recovery_columns, *(("problem",) if problems else ()))
    for shard in reply.shards:
        table.add_row(
            str(shard.shard),
            pb.ShardState.Name(shard.state).lower(),
            f"{shard.data.host}:{shard.data.port}" if shard.data.port else "-",
            str(shard.pid) if shard.pid else "-",
            str(shard.slots),
            f"{sum(usage.rows for usage in shard.tables):,}",
            _memory(shard),
            f"{shard.requests:,}",
            str(shard.connections),
            *((str(shard.restores), f"{shard.commits_lost:,} commits") if came_back else ()),
            *((shard.problem,) if problems else ()),
        )
    return table


def _memory(shard: pb.ShardStatus) -> str:
    from ...proto.units import format_bytes

    used = format_bytes(shard.used_bytes)
    return f"{used} of {format_bytes(shard.memory_budget_bytes)}" if shard.memory_budget_bytes else used


def _tiers(reply: pb.GetStatusReply) -> list[Table]:
    """Where keys were found, and what the SSD did."""
    from ...proto.units import format_bytes

    found = _table("rows in memory", "shard", "hits", "missed", "ahead", "evicted")
    disk = _table("SSD", "shard", "files", "memory", "read", "ms/read", "written", "ms/write")
    for shard in reply.shards:
        if not shard.HasField("tier"):
            continue
        tier = shard.tier
        keys = tier.hits + tier.misses
        found.add_row(
            str(shard.shard),
            f"{tier.hits / keys:.1%}" if keys else "-",
            f"{tier.misses:,}",
            f"{tier.brought_ahead:,}",
            f"{tier.rows_evicted:,}",
        )
        disk.add_row(
            str(shard.shard),
            format_bytes(tier.file_bytes),
            format_bytes(tier.memory_bytes),
            format_bytes(tier.bytes_read),
            f"{1e3 * tier.read_sec / tier.reads:.2f}" if tier.reads else "-",
            format_bytes(tier.bytes_written),
            f"{1e3 * tier.write_sec / tier.writes:.2f}" if tier.writes else "-",
        )
    return [found, disk]


def _tables(reply: pb.GetStatusReply) -> Table:
    from ...proto.schema import RowPolicy
    from ...proto.schema_message import schema_of_message
    from ...proto.units import format_bytes

    on_ssd = any(shard.HasField("tier") for shard in reply.shards)
    columns = ("table", "dim", "dtype", "optimizer", "rows", "memory")
    usages = [usage for shard in reply.shards for usage in shard.tables]
    schemas = [schema_of_message(message) for message in reply.tables]
    has_policy = any(schema.policy != RowPolicy() for schema in schemas)
    policy_columns = ("refused", "swept") if has_policy else ()
    table = _table("tables", *columns, *(("SSD rows", "SSD bytes") if on_ssd else ()), *policy_columns)
    for schema in schemas:
        mine = [usage for usage in usages if usage.table_id == schema.id]
        table.add_row(
            schema.full_name,
            str(schema.dim),
            schema.dtype,
            type(schema.optimizer).__name__,
            f"{sum(usage.rows for usage in mine):,}",
            format_bytes(sum(usage.total_bytes for usage in mine)),
            *((f"{sum(u.ssd_rows for u in mine):,}", format_bytes(sum(u.ssd_bytes for u in mine))) if on_ssd else ()),
            *((f"{sum(u.refused for u in mine):,}", f"{sum(sum(u.swept_rows) for u in mine):,}") if has_policy else ()),
        )
    return table


def _jobs(reply: pb.GetStatusReply) -> Table:
    table = _table("jobs", "job", "staleness", "rank", "worker", "epoch", "step", "lease left (s)")
    for job in reply.jobs:
        name = f"{job.namespace}/{job.name}"
        if not job.complete:
            name += f" ({len(job.members)} of {job.world_size} ranks have come)"
        staleness = str(job.staleness) if job.HasField("staleness") else "async"
        for member in job.members:
            table.add_row(
                name,
                staleness,
                str(member.rank),
                str(member.worker_id),
                str(member.epoch),
                str(member.step),
                f"{member.lease_left_sec:.1f}",
            )
    return table
