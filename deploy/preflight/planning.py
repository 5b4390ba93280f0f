"""What a table will take: bytes by tier, shards, network of a step, hit rates. The formulas are in docs/plan.md.

Pure functions of numbers; tests/e2e/test_plan.py compares them with a real cluster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...proto.errors import InvalidArgument, not_allowed

OPTIMIZERS = ("sgd", "momentum", "adagrad", "rowwise_adagrad", "adam")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

MEMORY_OVERHEAD = 31  # bytes of a row beyond weights and state: a head of 12, the index, and slack (store.h)
TIERED_OVERHEAD = 33  # of a row in memory where there is an SSD
SSD_HEADER = 24  # of a stored row (row_codec.h)
SSD_KEY = 14  # slot, table, key
SSD_REWRITTEN = 2.8  # times the rows' bytes, of files: images that were replaced go later (docs/internals/tiers.md)
SSD_MEMORY = 1.5  # filters and index of the database, for each row that it has
_EXACT_RANKS = 1 << 16
_FRAME, _SECTION, _TABLE, _ACK = 64, 16, 40, 24  # frame.h


@dataclass(frozen=True)
class PlannedTable:
    """A table.

    Args:
        rows: that it will have.
        dim: columns.
        optimizer: of OPTIMIZERS.
        dtype: of stored weights.
        skew: exponent of the Zipf law by which keys are asked for; 0: all alike.
    """

    rows: int
    dim: int
    optimizer: str = "adagrad"
    dtype: str = "float32"
    skew: float = 1.05

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("rows", self.rows, 1, 10**13),
            ("dim", self.dim, 1, 65535),
            ("skew", self.skew, 0.0, 4.0),
        ):
            if not low <= value <= high:
                raise InvalidArgument(f"--{name}: {value} is not allowed; allowed: [{low}, {high}]")
        for name, text, allowed in (("optimizer", self.optimizer, OPTIMIZERS), ("dtype", self.dtype, DTYPE_BYTES)):
            if text not in allowed:
                raise not_allowed(f"--{name}", text, allowed)

    @property
    def row_bytes(self) -> int:
        """Weights, padded to 4 bytes, and optimizer state."""
        state = {"sgd": 0, "momentum": self.dim, "adagrad": self.dim, "rowwise_adagrad": 1, "adam": 2 * self.dim}
        return (self.dim * DTYPE_BYTES[self.dtype] + 3) // 4 * 4 + 4 * state[self.optimizer]


@dataclass(frozen=True)
class Load:
    """What a step asks for.

    Args:
        lookups: keys of the table in one worker's step, with repeats: samples times lookups of each.
        workers: that take steps.
        wire: dtype of rows and gradients on the network.
    """

    lookups: int
    workers: int = 1
    wire: str = "float32"

    def __post_init__(self) -> None:
        for name, value in (("lookups", self.lookups), ("workers", self.workers)):
            if not 1 <= value <= 10**9:
                raise InvalidArgument(f"--{name}: {value} is not allowed; allowed: [1, {10**9}]")
        if self.wire not in DTYPE_BYTES:
            raise not_allowed("--wire", self.wire, DTYPE_BYTES)


@dataclass(frozen=True)
class Plan:
    """What it comes to.

    Attributes:
        row_bytes: weights and state; ``memory_row_bytes`` with all that a row in memory takes.
        all_in_memory_bytes: of the whole table.
        shards: how many.
        memory_rows, memory_bytes: in memory on all shards; ``memory_bytes`` with what the SSD's database takes.
        ssd_bytes: on all shards' SSDs; 0 without.
        ssd_most_bytes: of files there while rows are written again and again.
        unique_keys: of one worker's step, expected.
        pull_bytes, push_bytes: of one step of one worker, both directions of each, all shards.
        step_bytes: of one step of all workers.
        hit_rate: of unique keys, found in memory when the rows most asked for are there.
        lru_hit_rate: the same when those asked for last are there.
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


@dataclass(frozen=True)
class Popularity:
    """Keys by how often they are asked for, most first, in groups of equals.

    Attributes:
        counts: (groups) keys of each group, float64.
        shares: (groups) of all lookups, for one key of the group, float64.
    """

    counts: NDArray[np.float64]
    shares: NDArray[np.float64]

    @staticmethod
    def zipf(rows: int, exponent: float) -> Popularity:
        """The k-th key has a share of k^-exponent over their sum; beyond the first 65,536, ranks stand together."""
        exact = min(rows, _EXACT_RANKS)
        edges = np.arange(exact + 1, dtype=np.float64) + 0.5
        if rows > exact:
            edges = np.concatenate([edges, np.geomspace(exact + 0.5, rows + 0.5, 4096)[1:]])
        ranks = np.concatenate([np.arange(1, exact + 1), np.sqrt(edges[exact + 1 :] * edges[exact:-1])])
        counts = np.diff(edges)
        weights = ranks**-exponent
        return Popularity(counts, weights / (counts * weights).sum())

    def seen(self, draws: float) -> NDArray[np.float64]:
        """(groups) how likely a key is among so many independent draws."""
        return np.asarray(-np.expm1(draws * np.log1p(-np.minimum(self.shares, 1 - 1e-12))))

    def unique(self, draws: int) -> float:
        """Expected number of different keys among the draws."""
        return float((self.counts * self.seen(draws)).sum())

    def hits_of_most_asked(self, draws: int, room: float) -> float:
        """Share of a step's unique keys that are among the ``room`` keys most asked for."""
        asked = self.counts * self.seen(draws)
        before = np.concatenate([[0.0], np.cumsum(self.counts)[:-1]])
        inside = np.clip(room - before, 0.0, self.counts) / self.counts
        return float((asked * inside).sum() / asked.sum())

    def hits_of_last_asked(self, draws: int, room: float) -> float:
        """The same where the ``room`` keys asked for last are kept, by Che's approximation."""
        if room >= self.counts.sum():
            return 1.0
        asked = self.seen(draws)
        low, high = 0.0, 1.0
        while (self.counts * -np.expm1(-asked * high)).sum() < room:
            high *= 2
        for _ in range(100):
            steps = (low + high) / 2
            cached = (self.counts * -np.expm1(-asked * steps)).sum()
            low, high = (steps, high) if cached < room else (low, steps)
        weight = self.counts * asked
        return float((weight * -np.expm1(-asked * high)).sum() / weight.sum())


def plan(table: PlannedTable, load: Load, *, budget_bytes: int, has_ssd: bool, shards: int | None = None) -> Plan:
    """What a table takes.

    Args:
        table, load: what is kept, and asked for.
        budget_bytes: of rows and indexes in each shard's memory (``--memory-budget``).
        has_ssd: rows beyond the budgets go there; else there must be shards enough.
        shards: None: as few as hold all rows in memory; with an SSD one.

    Raises:
        InvalidArgument: the budget is too small, or so many shards do not hold the rows.
    """
    if budget_bytes < 16 << 20:
        raise InvalidArgument(f"--memory-budget: {budget_bytes} is not allowed; allowed: at least 16777216")
    in_memory = table.rows * (table.row_bytes + MEMORY_OVERHEAD)
    needed = max(1, math.ceil(in_memory / budget_bytes))
    if shards is None:
        shards = 1 if has_ssd else needed
    if not 1 <= shards <= 65535:
        raise not_allowed("--shards", shards, "[1, 65535]; or add an SSD")
    if shards < needed and not has_ssd:
        raise InvalidArgument(f"--shards: {shards} do not hold {in_memory} bytes; allowed: at least {needed}, or --ssd")
    memory_row = table.row_bytes + (TIERED_OVERHEAD if has_ssd else MEMORY_OVERHEAD)
    room = min(table.rows, shards * budget_bytes // memory_row)
    on_ssd = table.rows - room
    ssd_bytes = on_ssd * (table.row_bytes + SSD_HEADER + SSD_KEY)
    popularity = Popularity.zipf(table.rows, table.skew)
    unique = popularity.unique(load.lookups)
    pulled, pushed = _wire_bytes(table.dim * DTYPE_BYTES[load.wire], unique, shards)
    return Plan(
        row_bytes=table.row_bytes,
        memory_row_bytes=memory_row,
        all_in_memory_bytes=in_memory,
        shards=shards,
        memory_rows=room,
        memory_bytes=round(room * memory_row + SSD_MEMORY * on_ssd),
        ssd_bytes=ssd_bytes,
        ssd_most_bytes=round(SSD_REWRITTEN * ssd_bytes),
        unique_keys=unique,
        pull_bytes=pulled,
        push_bytes=pushed,
        step_bytes=load.workers * (pulled + pushed),
        hit_rate=popularity.hits_of_most_asked(load.lookups, room),
        lru_hit_rate=popularity.hits_of_last_asked(load.lookups, room),
    )


def _wire_bytes(row_bytes: int, unique: float, shards: int) -> tuple[float, float]:
    """Of a pull and its answer; of a commit of two phases and its answers. Without TCP's and IP's own."""
    table = _SECTION + _TABLE
    pull = shards * 2 * (_FRAME + table) + unique * (8 + row_bytes)
    answer = _FRAME + _SECTION + _ACK
    push = shards * (_FRAME + table + answer + _FRAME + answer) + unique * (8 + row_bytes)
    return pull, push
