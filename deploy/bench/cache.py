"""``bench cache``: measures what a row cache of 5 % of a table's rows saves at Zipf(1.05), and the cost of a lookup in
it.

Bytes are those of pulls on the wire, in both directions, after a warm-up. Each run has the same batches. The writers
decide which rows a cache can save, so there are three runs. In the first, a worker reads rows that no worker writes. In
the second, a worker trains every row it looks up, and sees its own steps at once (``own_commits: exact``), so that each
row it meets again has changed. In the third, a worker trains and sees its own steps within the staleness (``bounded``).

Lookups of cached rows are timed on one CPU against ``torch.index_select`` of as many rows from a tensor of the cache's
size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...cpp_ext import _client, torch_ops as ops
from ...worker.session.row_cache import OwnCommits, RowCache, cache_arguments
from .harness import Contender, Figure, median, pinned_to_one_cpu, time_in_turns
from .processes import SLOT_COUNT, BenchTable, shard_process, table_id

ZIPF = 1.05
SHARE = 0.05  # share of the rows that the cache may have
STALENESS = 8
LIMIT_OF_SAVED = 0.6
TRAINING = ("training, own steps exact", "training, own steps bounded")


@dataclass(frozen=True)
class Size:
    """The rows and columns of the table, the ids of a step, the steps before and during the measurement, and the timed
    repetitions.
    """

    rows: int
    dim: int
    ids: int
    warm_up: int
    steps: int
    repetitions: int


FULL = Size(rows=2_000_000, dim=32, ids=4096, warm_up=1000, steps=100, repetitions=200)
QUICK = Size(rows=20_000, dim=32, ids=256, warm_up=30, steps=10, repetitions=3)


@dataclass(frozen=True)
class _Run:
    bytes: float  # bytes of pulls per step
    hits: float  # share of the unique rows looked up
    asked: float
    misses: float


def run_cache(size: Size) -> Sequence[Figure]:
    """Returns saved bytes and hit rates of each run, and the nanoseconds per key of a lookup."""
    table = BenchTable("bench/cache", size.dim, size.rows)
    bytes_ = int(size.rows * SHARE) * _client.NativeRowCache.bytes_per_row(size.dim)
    runs: list[tuple[str, bool, OwnCommits | None]] = [
        ("no cache", False, None),
        ("rows nobody changes", False, "exact"),
        (TRAINING[0], True, "exact"),
        (TRAINING[1], True, "bounded"),
    ]
    with shard_process([table], jobs=len(runs)) as port:
        measured = {
            name: _measure(
                size,
                _session(size, table, port, job, None if own is None else RowCache(bytes_, STALENESS, own)),
                trains=trains,
            )
            for job, (name, trains, own) in enumerate(runs, start=1)
        }
    plain = measured.pop("no cache")
    title = (
        f"cache Zipf({ZIPF}) {SHARE:.0%} of {size.rows:,} x {size.dim}, {size.ids} ids a step, staleness {STALENESS}"
    )
    figures = [Figure(f"{title}: pulled without", plain.bytes / 1e3, "kB/step", higher_is_better=False)]
    for name, run in measured.items():
        limit = LIMIT_OF_SAVED if name == "rows nobody changes" else None
        figures += [
            Figure(
                f"cache, {name}: pulled, ratio saved", run.bytes / 1e3, "kB/step", limit, 1 - run.bytes / plain.bytes
            ),
            Figure(f"cache, {name}: hits", 100 * run.hits, "% of rows"),
            Figure(f"cache, {name}: asked about by version", 100 * run.asked, "% of rows", higher_is_better=False),
        ]
    return [*figures, *_probe_figures(size, bytes_)]


class _Bound:
    """A session and its connection, with one table that the gather operator looks up."""

    def __init__(self, client: _client.Client, native: _client.NativeSession, name: str, dim: int) -> None:
        self.client, self.native = client, native
        self._name, self._dim, self._anchor = name, dim, torch.zeros(1, requires_grad=True)

    def look_up(self, ids: Tensor) -> tuple[Tensor, int]:
        """Returns the looked-up rows, and the bytes that crossed the wire."""
        before = self._wire_bytes()
        rows: Tensor = ops.gather(ids, self._anchor, self._name, self._dim, -1, True)
        return rows, self._wire_bytes() - before

    def _wire_bytes(self) -> int:
        stats = self.client.stats()
        return stats["bytes_sent"] + stats["bytes_received"]


def _session(size: Size, table: BenchTable, port: int, job: int, cache: RowCache | None) -> _Bound:
    owner = np.zeros(SLOT_COUNT, np.uint16)
    client = _client.Client(
        shards=[("127.0.0.1", port)], slot_owner=owner, route_epoch=1, job_id=job, worker_epoch=1, transport="tcp"
    )
    native = _client.NativeSession(
        client.shards,
        first_step=0,
        first_sequence=1,
        clocked=False,
        grad_sum=False,
        deadline_ms=30_000,
        **cache_arguments(cache),
    )
    name = f"{table.name}-{job}"
    native.bind(name, table_id=table_id(table), schema_version=1, dim=size.dim, num_rows=size.rows, lr=0.01)
    return _Bound(client, native, name, size.dim)


def _measure(size: Size, session: _Bound, *, trains: bool) -> _Run:
    total, before = 0, session.native.stats()
    for step, ids in enumerate(_batches(size)):
        if step == size.warm_up:
            total, before = 0, session.native.stats()
        rows, moved = session.look_up(ids)
        total += moved
        if trains:
            rows.sum().backward()
        session.native.seal(1.0)
        session.native.commit()
    after = session.native.stats()
    session.native.close()
    hits, asked, misses = (after[name] - before[name] for name in ("cache_hits", "cache_revalidated", "cache_misses"))
    unique = max(1, hits + asked + misses)
    return _Run(total / size.steps, hits / unique, asked / unique, misses / unique)


def _batches(size: Size) -> Iterator[Tensor]:
    """Yields the ids of each step, scattered over the table; they are the same for every run."""
    weights = np.arange(1, size.rows + 1, dtype=np.float64) ** -ZIPF
    cumulative = np.cumsum(weights) / weights.sum()
    random = np.random.default_rng(17)
    scattered = random.permutation(size.rows)
    for _ in range(size.warm_up + size.steps):
        ranks = np.searchsorted(cumulative, random.random(size.ids))
        yield torch.from_numpy(scattered[np.minimum(ranks, size.rows - 1)])


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with pinned_to_one_cpu():
            yield
    finally:
        torch.set_num_threads(before)


def _keys_there(found: Callable[[NDArray[np.uint64]], NDArray[np.uint8]], places: int) -> NDArray[np.uint64]:
    """Returns those of the inserted keys that a full cache kept."""
    keys = np.arange(places, dtype=np.uint64)
    there: NDArray[np.uint64] = keys[found(keys) == 2]
    return there


def _probe_figures(size: Size, capacity_bytes: int) -> list[Figure]:
    cache = _client.NativeRowCache(capacity_bytes=capacity_bytes, dim=size.dim)
    places = cache.sets * 8
    keys = np.arange(places, dtype=np.uint64)
    cache.put(1, keys, np.ones(places, np.uint64), np.ones((places, size.dim), np.float32), 0)
    there = _keys_there(lambda asked: cache.probe(1, asked, 0)[0], places)
    tensor, random = torch.ones(places, size.dim), np.random.default_rng(5)

    def some_keys() -> NDArray[np.uint64]:
        return random.choice(there, min(size.ids, len(there)), replace=False)

    def some_rows() -> Tensor:
        return torch.from_numpy(some_keys().astype(np.int64))

    with _one_thread():
        probes, selects = time_in_turns(
            [
                Contender("probe", some_keys, lambda keys: cache.probe(1, keys, 0)),
                Contender("index_select", some_rows, lambda rows: torch.index_select(tensor, 0, rows)),
            ],
            repetitions=size.repetitions,
        )
    return _against_select("cache probe, CPU", probes, selects, min(size.ids, len(there)))


def _against_select(name: str, ours: list[float], selects: list[float], keys: int) -> list[Figure]:
    nanoseconds = 1e9 / keys
    ratio = median(ours) / median(selects)
    return [
        Figure(f"{name}: ns/key, ratio to index_select", median(ours) * nanoseconds, "ns", None, ratio, False),
        Figure(f"{name}: torch.index_select", median(selects) * nanoseconds, "ns", higher_is_better=False),
    ]
