"""A cluster on one screen: the tables that ``sparserow status`` prints, and ``sparserow top`` keeps up to date."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ...proto import control_pb2 as pb
from ...proto.options.units import format_bytes
from ...proto.schema import RowPolicy
from ...proto.schema_message import schema_of_message
from ...proto.status.alarms import lost_text, not_ready_text
from ...proto.status.cluster_status import ClusterStatus
from ...proto.status.fault_view import when, with_firsts
from ...proto.status.shard_view import ShardView, Times
from ...proto.status.stream_view import StreamView
from ...proto.status.table_view import TableView
from .serving_view import ServedReplica
from .whole_cells import WholeCells

_TEXT_COLUMNS = frozenset(
    {
        *("state", "data", "table", "dtype", "optimizer", "job", "staleness", "problem", "request", "process", "model"),
        *("when", "host", "fault", "source"),
    }
)
_PROSE_COLUMNS = frozenset({"problem", "fault"})
_MOST_FAULTS, _FAULT_CHARS = 10, 120
_KINDS = ("pull", "pull_waited", "lookup", "commit", "write", "scan")


def screen(address: str, reply: pb.GetStatusReply, view: ClusterStatus) -> RenderableType:
    """Returns the whole screen.

    Args:
        address: the address of the coordinator.
        reply: the newest status.
        view: the figures of that status.
    """
    not_ready = not_ready_text(view.problem)
    state = Text("ready", "green") if view.ready else Text(not_ready, "red")
    parts: list[RenderableType] = [Text(f"cluster {view.cluster_id} at {address}: ").append_text(state)]
    for alarm in view.wrong:
        mend = alarm.mend.replace("HOST:PORT", address)
        if alarm.text != not_ready:
            parts.append(Text(alarm.text, "red"))
        if mend:
            parts.append(Text(f"  {mend}"))
    parts.append(f"{view.slots} slots, route epoch {view.route_epoch}; {_checkpoint(view)}")
    parts.append(_shards(reply, view))
    if view.over_sec:
        parts.append(_load(view))
    if any(shard.HasField("tier") for shard in reply.shards):
        parts += _tiers(reply)
    if any(shard.times for shard in view.shards):
        parts.append(_requests(view))
    skews = [f"{name} {value:.2f}" for name, value in view.skew.items() if value is not None]
    if len(view.shards) > 1 and skews:
        parts.append(f"skew between shards (largest / mean): {', '.join(skews)}")
    parts.append(_tables(reply, view) if reply.tables else "no tables")
    if view.hot_keys:
        parts.append(_hot_keys(view))
    parts.append(_jobs(reply) if reply.jobs else "no jobs")
    if view.streams:
        parts.append(_streams(view.streams))
    if view.leaving:
        parts.append(f"workers that are leaving: {view.leaving}; what shards have lost of them is not counted yet")
    if view.faults:
        parts.append(_faults(view))
    return Group(*parts)


def _checkpoint(view: ClusterStatus) -> str:
    if not view.checkpoint:
        return "no checkpoint has these rows"
    age = "of unknown age" if view.checkpoint_age_sec is None else f"{_duration(view.checkpoint_age_sec)} old"
    damaged = f"; damaged: {', '.join(view.damaged_checkpoints)}" if view.damaged_checkpoints else ""
    return f"newest checkpoint {view.checkpoint}, {age}{damaged}"


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def short_time(seconds: float | None) -> str:
    """Returns a time in seconds as text such as ``12 µs`` or ``3.4 ms``; a dash for None."""
    if seconds is None:
        return "-"
    if seconds == float("inf"):
        return "> 10 s"
    for unit, length in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _table(title: str, *columns: str) -> WholeCells:
    return WholeCells(title, columns, left=_TEXT_COLUMNS, prose=_PROSE_COLUMNS)


def _shards(reply: pb.GetStatusReply, view: ClusterStatus) -> WholeCells:
    problems = any(shard.problem for shard in view.shards)
    came_back = any(shard.restores for shard in view.shards)
    columns = ("shard", "state", "data", "pid", "slots", "rows", "memory", "clients", "requests")
    more = (*(("restored", "lost") if came_back else ()), *(("problem",) if problems else ()))
    table = _table("shards", *columns, *more)
    for shard, each in zip(reply.shards, view.shards, strict=True):
        table.add_row(
            str(each.shard),
            each.state,
            f"{shard.data.host}:{shard.data.port}" if shard.data.port else "-",
            str(shard.pid) if shard.pid else "-",
            str(each.slots),
            f"{each.rows:,}",
            _memory(each),
            f"{each.connections} ({each.local_connections} local)" if each.local_connections else str(each.connections),
            f"{each.requests:,}",
            *((str(each.restores), lost_text(each)) if came_back else ()),
            *((each.problem,) if problems else ()),
        )
    return table


def _load(view: ClusterStatus) -> WholeCells:
    """Returns the table of what each shard did between the readings."""
    columns = ("shard", "requests/s", "rows pulled/s", "pushed/s", "net/s", "p99 pull", "p99 commit", "followers")
    table = _table(f"load of the last {view.over_sec:.1f} s", *columns)
    for each in view.shards:
        table.add_row(
            str(each.shard),
            _rate(each.requests_per_sec),
            _rate(each.rows_pulled_per_sec),
            _rate(each.rows_applied_per_sec),
            "-" if each.bytes_per_sec is None else format_bytes(round(each.bytes_per_sec)),
            short_time(each.p99("pull")),
            short_time(each.p99("commit")),
            str(each.followers),
        )
    return table


def _memory(shard: ShardView) -> str:
    used = format_bytes(shard.memory_bytes)
    text = f"{used} of {format_bytes(shard.budget_bytes)}" if shard.budget_bytes else used
    return f"{text}, {format_bytes(shard.reserved_bytes)} reserved" if shard.reserved_bytes else text


def _requests(view: ClusterStatus) -> WholeCells:
    """Returns the number of requests by kind, and the times of the shard with the longest."""
    since = f"of the last {view.over_sec:.1f} s" if view.over_sec else "since the start"
    table = _table(f"times of requests, {since}", "request", "per s", "p50", "p99", "worst shard")
    for kind in _KINDS:
        found: list[tuple[int, Times]] = [
            (shard.shard, each) for shard in view.shards for each in shard.times if each.kind == kind
        ]
        if not found:
            continue
        worst, times = max(found, key=lambda pair: pair[1].p99_sec or 0.0)
        rates = [each.per_sec for _, each in found if each.per_sec is not None]
        table.add_row(
            kind.replace("pull_waited", "pull that waited for the clock"),
            f"{sum(rates):,.0f}" if rates else "-",
            short_time(times.p50_sec),
            short_time(times.p99_sec),
            str(worst),
        )
    return table


def _tiers(reply: pb.GetStatusReply) -> list[WholeCells]:
    """Returns the tables of where keys were found, and of what the SSD did."""
    found = _table("rows in memory", "shard", "hits", "missed", "ahead", "evicted")
    disk = _table("SSD", "shard", "files", "memory", "read", "waited", "ms/read", "written", "ms/write")
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
            f"{tier.rows_waited / tier.rows_read:.1%}" if tier.rows_read else "-",
            f"{1e3 * tier.read_sec / tier.reads:.2f}" if tier.reads else "-",
            format_bytes(tier.bytes_written),
            f"{1e3 * tier.write_sec / tier.writes:.2f}" if tier.writes else "-",
        )
    return [found, disk]


def _tables(reply: pb.GetStatusReply, view: ClusterStatus) -> WholeCells:
    on_ssd = any(shard.HasField("tier") for shard in reply.shards)
    schemas = [schema_of_message(message) for message in reply.tables]
    has_policy = any(schema.policy != RowPolicy() for schema in schemas)
    columns = ("table", "dim", "dtype", "optimizer", "rows", "memory", "stale p50/p99")
    more = (
        *(("SSD rows", "SSD bytes") if on_ssd else ()),
        *(("refused", "swept", "age p50/p99") if has_policy else ()),
    )
    table = _table("tables", *columns, *more)
    for schema, each in zip(schemas, view.tables, strict=True):
        table.add_row(
            schema.full_name,
            str(schema.dim),
            schema.dtype,
            type(schema.optimizer).__name__,
            f"{each.rows:,}",
            format_bytes(each.memory_bytes),
            "-" if each.staleness_p50 is None else f"{each.staleness_p50:g}/{each.staleness_p99:g}",
            *((f"{each.ssd_rows:,}", format_bytes(each.ssd_bytes)) if on_ssd else ()),
            *((f"{each.refused:,}", f"{each.swept:,}", _ages(each)) if has_policy else ()),
        )
    return table


def _ages(table: TableView) -> str:
    steps, seconds = table.ages_steps, table.ages_seconds
    found = [] if steps is None else [f"{steps.p50:,.0f}/{steps.p99:,.0f} steps"]
    if seconds is not None:
        found.append(f"{_duration(seconds.p50)}/{_duration(seconds.p99)}")
    return ", ".join(found) or "-"


def _hot_keys(view: ClusterStatus) -> WholeCells:
    table = _table("keys asked for most (sampled)", "table", "key", "shard", "share", "per s")
    for each in view.hot_keys:
        table.add_row(each.table, str(each.key), str(each.shard), f"{each.share:.2%}", _rate(each.per_sec))
    return table


def _jobs(reply: pb.GetStatusReply) -> WholeCells:
    table = _table("jobs", "job", "staleness", "rank", "worker", "epoch", "step", "lease left (s)")
    for job in reply.jobs:
        name = f"{job.namespace}/{job.name}"
        if not job.complete:
            name += f" ({len(job.members)} of {job.world_size} ranks have come)"
        staleness = str(job.staleness) if job.HasField("staleness") else "async"
        if job.quorum:
            staleness += f", quorum {job.quorum}"
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


def _streams(streams: Sequence[StreamView]) -> WholeCells:
    columns = ("parts", "lag", "events", "events/s", "dead", "empty", "lost", "late", "behind")
    table = _table("streams", "job", "source", *columns)
    for each in streams:
        table.add_row(
            each.job,
            each.source,
            *(f"{number:,}" for number in (each.parts, each.lag, each.events)),
            _rate(each.events_per_sec),
            *(f"{number:,}" for number in (each.dead, each.empty, each.lost, each.late)),
            "-" if each.behind_sec is None else _duration(each.behind_sec),
        )
    return table


def _faults(view: ClusterStatus) -> WholeCells:
    title = "faults of workers (tracebacks: sparserow status --faults)"
    table = _table(title, "when", "job", "rank", "host", "fault")
    for fault, is_first in with_firsts(view.faults)[:_MOST_FAULTS]:
        message = fault.message if len(fault.message) <= _FAULT_CHARS else fault.message[: _FAULT_CHARS - 1] + "…"
        words = (when(fault, is_first), fault.job, str(fault.rank), fault.host or "-", message)
        table.add_row(*words, style="" if is_first else "dim")
    return table


def serving_table(views: Sequence[ServedReplica]) -> WholeCells:
    """Returns the table of serving processes."""
    problems = any(each.problem for each in views)
    columns = ("process", "model", "version", "rows", "behind", "fresh p50", "fresh p99")
    table = _table("serving", *columns, *(("problem",) if problems else ()))
    for each in views:
        table.add_row(
            each.address,
            each.model,
            str(each.version or "-"),
            f"{each.rows:,}",
            short_time(each.behind_sec),
            short_time(each.fresh_p50_sec),
            short_time(each.fresh_p99_sec),
            *((each.problem,) if problems else ()),
        )
    return table
