"""Computes what a table will take: bytes by tier, shards, network of a step, hit rates (formulas: docs/plan.md).

The functions are pure functions of numbers; tests/e2e/test_plan.py compares them with a real cluster.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ...proto.errors import InvalidArgument, not_allowed
from ...proto.optim import OPTIMIZERS, SGD, Adagrad, Adam, RowOptimizer
from .popularity import Popularity

# The optimizers of `sparserow plan` by name; options that add state have a name of their own.
PLANNED_OPTIMIZERS: Mapping[str, RowOptimizer] = MappingProxyType({
    "sgd": SGD(),
    "momentum": SGD(momentum=0.9),
    **{kind: optimizer() for kind, optimizer in OPTIMIZERS.items() if kind != "sgd"},
    "amsgrad": Adam(amsgrad=True),
})  # fmt: skip
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

MEMORY_OVERHEAD = 31  # bytes of a row beyond weights and state: header of 12, index and slack (store.h)
TIERED_OVERHEAD = 33  # the same bytes of a row in memory when there is an SSD
SSD_HEADER = 24  # bytes of a stored row's header (row_codec.h)


@dataclass(frozen=True)
class SsdCosts:
    """What an engine of the SSD tier takes for each row that it has.

    Args:
        key_bytes: bytes on the SSD beside the row's header, weights and state.
        rewritten: the largest size of files over the rows' bytes, because replaced images are removed later.
        budget_bytes: bytes of the memory budget.
        memory_bytes: bytes of memory beside the budget.
    """

    key_bytes: int
    rewritten: float
    budget_bytes: float
    memory_bytes: float


SSD_COSTS: Mapping[str, SsdCosts] = MappingProxyType({
    "pages": SsdCosts(key_bytes=8, rewritten=1.75, budget_bytes=12.5, memory_bytes=0.0),
    "rocksdb": SsdCosts(key_bytes=14, rewritten=2.8, budget_bytes=0.0, memory_bytes=1.5),
})  # fmt: skip
CACHE_OVERHEAD = 40  # bytes of a cached row beyond its weights (row_cache.h)
DEVICE_SHARE = 0.25  # of a device's memory, for all tables with placement auto together
_FRAME, _SECTION, _TABLE, _ACK = 64, 16, 40, 24  # frame.h


@dataclass(frozen=True)
class PlannedTable:
    """A table that is planned.

    Args:
        rows: the number of rows that it will have.
        dim: the number of elements of a row.
        optimizer: the optimizer, whose state a row has beside its weights.
        dtype: the dtype of stored weights.
        skew: the exponent of the Zipf law of lookups; 0 makes all keys equally likely.
    """

    rows: int
    dim: int
    optimizer: RowOptimizer = Adagrad()  # noqa: RUF009 - it is immutable
    dtype: str = "float32"
    skew: float = 1.05

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("rows", self.rows, 1, 10**13),
            ("dim", self.dim, 1, 65535),
            ("skew", self.skew, 0.0, 4.0),
        ):
            if not low <= value <= high:
                raise not_allowed(f"--{name}", value, f"[{low}, {high}]")
        if self.dtype not in DTYPE_BYTES:
            raise not_allowed("--dtype", self.dtype, DTYPE_BYTES)

    @property
    def row_bytes(self) -> int:
        """The bytes of a row's weights, padded to 4 bytes, and of its optimizer state."""
        return (self.dim * DTYPE_BYTES[self.dtype] + 3) // 4 * 4 + 4 * self.optimizer.state_floats(self.dim)


@dataclass(frozen=True)
class Load:
    """The load of a training step.

    Args:
        lookups: the number of keys in one worker's step, with repeats: samples times lookups of each.
        workers: the number of workers.
        wire: the dtype of rows and gradients on the network.
    """

    lookups: int
    workers: int = 1
    wire: str = "float32"

    def __post_init__(self) -> None:
        for name, value in (("lookups", self.lookups), ("workers", self.workers)):
            if not 1 <= value <= 10**9:
                raise not_allowed(f"--{name}", value, f"[1, {10**9}]")
        if self.wire not in DTYPE_BYTES:
            raise not_allowed("--wire", self.wire, DTYPE_BYTES)


@dataclass(frozen=True)
class PlannedCache:
    """A worker's row cache that is planned; ``own_commits`` is "bounded", without which a trained row is never a hit.

    Args:
        bytes: the capacity for the rows of the table.
        staleness: the number of steps for which a row serves lookups.
        dtype: the dtype of kept rows.
    """

    bytes: int
    staleness: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name, value, low in (("cache", self.bytes, 1), ("cache-staleness", self.staleness, 1)):
            if not low <= value < 1 << 50:
                raise not_allowed(f"--{name}", value, f"[{low}, {1 << 50})")
        if self.dtype not in DTYPE_BYTES:
            raise not_allowed("--cache-dtype", self.dtype, DTYPE_BYTES)


@dataclass(frozen=True)
class CachePlan:
    """What a row cache saves in a worker's step.

    Attributes:
        rows: the rows of the table that it holds.
        hit_rate: the share of unique keys that need no pull.
    """

    rows: int
    hit_rate: float


@dataclass(frozen=True)
class Plan:
    """What a table will take.

    Attributes:
        row_bytes: the bytes of a row's weights and state; ``memory_row_bytes`` is all that a row in memory takes.
        all_in_memory_bytes: the bytes of the whole table in memory.
        shards: the number of shards.
        memory_rows, memory_bytes: the rows and bytes in memory on all shards; the bytes include the memory of the SSD's
            database.
        ssd_bytes: the bytes on the SSDs of all shards; 0 without SSDs.
        ssd_most_bytes: the largest size of files there while rows are rewritten.
        unique_keys: the expected number of different keys in one worker's step.
        pull_bytes, push_bytes: the bytes of one step of one worker, in both directions and for all shards.
        step_bytes: the bytes of one step of all workers.
        hit_rate: the share of unique keys found in memory when the most popular rows are in memory.
        lru_hit_rate: the same share when the most recently read rows are in memory.
        cache: what the workers' row caches save; None: there are none.
    """

    row_bytes: int
    memory_row_bytes: int
    all_in_memory_bytes: int
    shards: int
    memory_rows: int
    memory_bytes: int
    ssd_bytes: int
    ssd_most_bytes: int
    unique_keys: float
    pull_bytes: float
    push_bytes: float
    step_bytes: float
    hit_rate: float
    lru_hit_rate: float
    cache: CachePlan | None = None


def plan(
    table: PlannedTable,
    load: Load,
    *,
    budget_bytes: int,
    has_ssd: bool,
    ssd_engine: str = "pages",
    shards: int | None = None,
    cache: PlannedCache | None = None,
) -> Plan:
    """Computes what a table takes.

    Args:
        table, load: the table, and the load of a step.
        budget_bytes: the budget of rows and indexes in each shard's memory (``--memory-budget``), in bytes.
        has_ssd: whether rows beyond the budgets go to an SSD; otherwise there must be enough shards.
        ssd_engine: the storage of rows on the SSD, ``pages`` or ``rocksdb``.
        shards: the number of shards; None takes as few as hold all rows in memory, or one with an SSD.
        cache: the row cache of each worker; None: there is none.

    Raises:
        InvalidArgument: the budget is too small, or so many shards do not hold the rows.
    """
    if budget_bytes < 16 << 20:
        raise not_allowed("--memory-budget", budget_bytes, "at least 16777216")
    in_memory = table.rows * (table.row_bytes + MEMORY_OVERHEAD)
    needed = max(1, math.ceil(in_memory / budget_bytes))
    if shards is None:
        shards = 1 if has_ssd else needed
    if not 1 <= shards <= 65535:
        raise not_allowed("--shards", shards, "[1, 65535]; or add an SSD")
    if shards < needed and not has_ssd:
        raise InvalidArgument(f"--shards: {shards} do not hold {in_memory} bytes; allowed: at least {needed}, or --ssd")
    memory_row = table.row_bytes + (TIERED_OVERHEAD if has_ssd else MEMORY_OVERHEAD)
    if ssd_engine not in SSD_COSTS:
        raise not_allowed("--ssd-engine", ssd_engine, SSD_COSTS)
    costs = SSD_COSTS[ssd_engine]
    index_bytes = costs.budget_bytes if has_ssd and shards * budget_bytes < table.rows * memory_row else 0.0
    # Rows that come back to memory keep their image on the SSD until they are evicted again.
    room = min(table.rows, int((shards * budget_bytes - index_bytes * table.rows) / memory_row))
    if room <= 0:
        raise InvalidArgument(
            f"--memory-budget: {budget_bytes} is not allowed; the index of {table.rows:,} rows on the SSD takes "
            f"{index_bytes * table.rows / shards:,.0f} bytes of each shard; allowed: more than that, more shards, or "
            "--ssd-engine rocksdb"
        )
    on_ssd = table.rows - room
    ssd_bytes = on_ssd * (table.row_bytes + SSD_HEADER + costs.key_bytes)
    popularity = Popularity.zipf(table.rows, table.skew)
    unique = popularity.unique(load.lookups)
    pulled, pushed = _wire_bytes(table.dim * DTYPE_BYTES[load.wire], unique, shards)
    return Plan(
        row_bytes=table.row_bytes,
        memory_row_bytes=memory_row,
        all_in_memory_bytes=in_memory,
        shards=shards,
        memory_rows=room,
        memory_bytes=round(room * memory_row + index_bytes * table.rows + costs.memory_bytes * on_ssd),
        ssd_bytes=ssd_bytes,
        ssd_most_bytes=round(costs.rewritten * ssd_bytes),
        unique_keys=unique,
        pull_bytes=pulled,
        push_bytes=pushed,
        step_bytes=load.workers * (pulled + pushed),
        hit_rate=popularity.hits_of_most_asked(load.lookups, room),
        lru_hit_rate=popularity.hits_of_last_asked(load.lookups, room),
        cache=None if cache is None else _cache_plan(table, load, cache, popularity),
    )


def _cache_plan(table: PlannedTable, load: Load, cache: PlannedCache, popularity: Popularity) -> CachePlan:
    row = table.dim * DTYPE_BYTES[cache.dtype]
    room = min(table.rows, cache.bytes // (row + CACHE_OVERHEAD))
    return CachePlan(rows=room, hit_rate=popularity.hits_within(load.lookups, room, cache.staleness))


def _wire_bytes(row_bytes: int, unique: float, shards: int) -> tuple[float, float]:
    """Returns the bytes of a pull and its answer, and of a two-phase commit and its answers, without TCP and IP
    headers.
    """
    table = _SECTION + _TABLE
    pull = shards * 2 * (_FRAME + table) + unique * (8 + row_bytes)
    answer = _FRAME + _SECTION + _ACK
    push = shards * (_FRAME + table + answer + _FRAME + answer) + unique * (8 + row_bytes)
    return pull, push


@dataclass(frozen=True)
class DevicePlan:
    """What a table would take on the devices of the workers, and where placement ``auto`` puts it.

    Attributes:
        rank_bytes: the bytes of a worker's share of weights, state and update counts.
        room_bytes: the bytes that tables with placement ``auto`` may have on a device.
        exchange_bytes: the bytes of one step that cross between one worker and the others, in both directions.
        server_bytes: the bytes of one step that would cross between one worker and servers.
        placement: ``device`` or ``servers``.
        reason: why.
    """

    rank_bytes: int
    room_bytes: int
    exchange_bytes: float
    server_bytes: float
    placement: str
    reason: str


def plan_on_devices(table: PlannedTable, load: Load, *, device_bytes: int, used_bytes: int = 0) -> DevicePlan:
    """Computes what a table takes on devices, and decides where it is with placement ``auto``.

    It is on the devices when all such tables together take at most a quarter of a device, and a step moves no more
    bytes between workers than it would between workers and servers.

    Args:
        table, load: the table, and the load of a step.
        device_bytes: the memory of one device, in bytes.
        used_bytes: the bytes that other tables with placement ``auto`` have there already.
    """
    state = table.optimizer.state_floats(table.dim)
    rank_bytes = math.ceil(table.rows / load.workers) * 4 * (table.dim + state + 1)
    room = max(0, int(device_bytes * DEVICE_SHARE) - used_bytes)
    unique = Popularity.zipf(table.rows, table.skew).unique(load.lookups)
    away = unique * (load.workers - 1) / load.workers
    # Keys there, rows back, and at the end of the step keys and gradients; two numbers to each worker with each.
    exchange = 2 * away * (8 + 4 * table.dim) + 2 * 16 * (load.workers - 1)
    by_servers = sum(_wire_bytes(table.dim * DTYPE_BYTES[load.wire], unique, 1))
    if table.dtype != "float32":
        placement, reason = "servers", f"rows on devices are float32, and these are {table.dtype}"
    elif rank_bytes > room:
        placement, reason = "servers", f"a worker's share is {rank_bytes} bytes, and {room} are for such tables"
    elif exchange > by_servers:
        placement, reason = "servers", f"a step would move {exchange:.0f} bytes, and {by_servers:.0f} with servers"
    else:
        placement, reason = "device", f"it fits, and a step moves {exchange:.0f} bytes, not {by_servers:.0f}"
    return DevicePlan(rank_bytes, room, exchange, by_servers, placement, reason)
