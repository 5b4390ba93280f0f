"""``sparserow plan``: computes what a table will take, before there is a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plan(
    *,
    rows: Annotated[str, typer.Option(help="Rows of the table, such as 2e9.")],
    dim: Annotated[int, typer.Option(help="Number of elements of a row.")],
    optimizer: Annotated[
        str, typer.Option(help="Optimizer of the rows, such as adagrad; docs/optimizers.md has all.")
    ] = "adagrad",
    dtype: Annotated[str, typer.Option(help="Dtype of stored weights: float32, bfloat16 or float16.")] = "float32",
    skew: Annotated[
        float, typer.Option(help="Exponent of the Zipf law of lookups; 0: all keys are equally likely.")
    ] = 1.05,
    batch: Annotated[int, typer.Option(min=1, help="Samples in a step of one worker.")] = 2048,
    lookups: Annotated[int, typer.Option(min=1, help="Keys of the table in one sample.")] = 1,
    workers: Annotated[int, typer.Option(help="Number of workers.")] = 1,
    wire: Annotated[str, typer.Option(help="Dtype of rows and gradients on the network.")] = "float32",
    memory_budget: Annotated[str, typer.Option(help="Memory of each shard for this table, such as 64GiB.")] = "64GiB",
    ssd: Annotated[bool, typer.Option("--ssd", help="Rows beyond the memory budgets go to an SSD.")] = False,
    ssd_engine: Annotated[str, typer.Option(help="Storage of rows on the SSD: pages or rocksdb.")] = "pages",
    shards: Annotated[
        int | None, typer.Option(help="Number of shards. Default: as few as the rows need; with --ssd one.")
    ] = None,
    cache: Annotated[
        str | None, typer.Option(help="Row cache of each worker for this table, such as 2GiB. Default: none.")
    ] = None,
    cache_staleness: Annotated[int, typer.Option(help="Steps for which a cached row is used.")] = 1,
    cache_dtype: Annotated[str, typer.Option(help="Dtype of cached rows: float32, bfloat16 or float16.")] = "float32",
    device_memory: Annotated[
        str | None,
        typer.Option(help="Memory of a worker's device, such as 80GiB: whether placement auto puts the table there."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="File to write the figures to, as JSON.")] = None,
) -> None:
    """Compute what a table takes: bytes by tier, shards, network of a step, hit rates.
    docs/plan.md has the formulas.
    """
    from dataclasses import asdict

    from rich.table import Table

    from ...proto.errors import not_allowed
    from ...proto.options.units import format_bytes, parse_bytes
    from ..preflight.planning import (
        PLANNED_OPTIMIZERS,
        Load,
        PlannedCache,
        PlannedTable,
        plan as make_plan,
        plan_on_devices,
    )
    from .result_file import check_result_file, write_result
    from .terminal import tables_console

    check_result_file(json_file)
    try:
        count = int(float(rows))
    except (ValueError, OverflowError):
        raise not_allowed("--rows", rows, "a number, such as 2e9") from None
    if optimizer not in PLANNED_OPTIMIZERS:
        raise not_allowed("--optimizer", optimizer, PLANNED_OPTIMIZERS)
    table = PlannedTable(count, dim, PLANNED_OPTIMIZERS[optimizer], dtype, skew)
    load = Load(batch * lookups, workers, wire)
    if cache is None and (cache_staleness != 1 or cache_dtype != "float32"):
        raise not_allowed("--cache", None, "a size beside --cache-staleness and --cache-dtype, such as 2GiB")
    planned = None if cache is None else PlannedCache(parse_bytes(cache), cache_staleness, cache_dtype)
    if ssd_engine != "pages" and not ssd:
        raise not_allowed("--ssd-engine", ssd_engine, "pages without --ssd, since it has no effect")
    made = make_plan(
        table,
        load,
        budget_bytes=parse_bytes(memory_budget),
        has_ssd=ssd,
        ssd_engine=ssd_engine,
        shards=shards,
        cache=planned,
    )

    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for name, value in (
        ("a row", f"{made.row_bytes} B of weights and state, {made.memory_row_bytes} B in memory"),
        ("all rows in memory", format_bytes(made.all_in_memory_bytes)),
        ("shards", str(made.shards)),
        ("memory", _shared(made.memory_bytes, made.shards)),
        ("SSD", _shared(made.ssd_bytes, made.shards) if ssd else "-"),
        ("SSD as rows are rewritten", f"up to {_shared(made.ssd_most_bytes, made.shards)}" if ssd else "-"),
        ("rows in memory", f"{made.memory_rows:,} of {count:,}"),
        ("unique keys of a step", f"{made.unique_keys:,.0f} of {load.lookups:,} lookups"),
        ("found in memory", f"{made.lru_hit_rate:.1%} to {made.hit_rate:.1%} of unique keys"),
        ("network of a worker's step", f"pull {_size(made.pull_bytes)}, push {_size(made.push_bytes)}"),
        ("network of a step", _shared(made.step_bytes, made.shards)),
    ):
        shown.add_row(name, value)
    if made.cache is not None:
        shown.add_row("rows in a row cache", f"{made.cache.rows:,}")
        shown.add_row("found in a row cache", f"{made.cache.hit_rate:.1%} of unique keys")
    figures = asdict(made)
    if device_memory is not None:
        there = plan_on_devices(table, load, device_bytes=parse_bytes(device_memory))
        shown.add_row(
            "on devices of workers", f"{_size(there.rank_bytes)} each of {_size(there.room_bytes)} for tables"
        )
        shown.add_row("exchange of a worker's step", f"{_size(there.exchange_bytes)} between devices")
        shown.add_row("placement auto", f"{there.placement}: {there.reason}")
        figures["on_devices"] = asdict(there)
    tables_console().print(shown)
    write_result(json_file, figures)


def _shared(count: float, shards: int) -> str:
    return f"{_size(count)}, {_size(count / shards)} a shard"


def _size(count: float) -> str:
    from ...proto.options.units import format_bytes

    return format_bytes(round(count))
