"""``sparserow bench tiers``: measures pull and commit of a store whose memory has room for a tenth of its rows.

Each engine of the SSD has its turn, in as much resident memory: the index of ``pages`` is part of the budget, and the
buffers, filters and cache of ``rocksdb`` are taken off its own.

Each batch is drawn with repeats, as a batch of a model has them, then made unique, pulled and pushed with Adagrad. A
rate counts the unique rows. The references take turns with it, a block of batches each. They are the same store all in
memory, and the SSD's engine alone. The engine reads as many rows in one batch as the store looked up there, and writes
as many as it evicted. Then a DLRM is trained over both stores (``tiered_training.py``). Figures come as their part
ends.

A database continues to work after its writes. In turns of one batch each had most of that work done while another had
its turn, and the store that left both CPUs the least room seemed the fastest. (With 5 million rows and uniform keys it
had 0.42 of the database alone; in processes of their own, seconds at a time, it is 0.87.) So turns are long, and the
next turn begins when both databases are at rest. The database that was filled last had more of its files in the
system's cache. Therefore the files of both are read once before each law; what came from the disk all the same is
shown.

The stores are filled with the rarest keys first. So the tenth of the rows that is in memory then is about the tenth
that a long run would have there. A store that is filled in any other order meets each key for the first time: of 20
million rows under Zipf(1.05) every miss of the first 500 batches was such a key (28.8 % of a batch's; 18 % are not
among the tenth that is drawn most). Rows that will not stay in memory are pushed in the order in which the database
keeps them, which is less work for it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from ...cpp_ext import _bench, _server
from ...proto.errors import DeadlineExceeded
from .eviction_policies import POLICIES, hit_share
from .harness import MIN_REPETITIONS, Figure
from .processes import SLOT_COUNT
from .ssd_access import AccessSize, access_figures
from .tiered_training import TrainingSize, measure_training

MEMORY_LIMIT = 0.2
RAW_LIMIT = 0.7
CPU_LIMITS_US = {"pages": 4.0, "rocksdb": 8.0}  # of a row there and back
WRITTEN_LIMIT = 2.0  # bytes to the disk over those of evicted rows
SETTLED_SEC = 120.0
_TABLE = 1
_LR = 0.01
_HEAD_BYTES = 24  # bytes of a stored row's header
_ROCKSDB_BYTES = 100 << 20  # of three write buffers and a block cache
_ROCKSDB_ROW_BYTES = 1.5  # of filters and index


@dataclass(frozen=True)
class TiersSize:
    """The sizes of one run.

    Args:
        rows: the number of rows of the table.
        dim: the number of float32 columns.
        batch: the number of keys of a pull and push, with repeats.
        share: the share of the table's memory that the tiered store may use.
        warm_up: the number of batches before the first figure. Uniform keys have a quarter of it, because their hit
            rate does not depend on earlier batches.
        repetitions: the number of measured batches of each contender.
        block: the number of batches of one turn.
        exponent: the exponent of the Zipf law by which keys are drawn.
        training: the sizes of the training of the DLRM.
        access: the sizes of the engine alone by the way in which it reads its file.
    """

    rows: int
    dim: int
    batch: int
    share: float
    warm_up: int
    repetitions: int
    block: int
    training: TrainingSize
    access: AccessSize
    exponent: float = 1.05


FULL = TiersSize(
    rows=20_000_000,
    dim=32,
    batch=16_384,
    share=0.1,
    warm_up=400,
    repetitions=150,
    block=30,
    training=TrainingSize(batch=2048, features=26, blocks=4, steps=20, hints=4),
    access=AccessSize(rows=600_000, batch=4096, turns=6, batches=12),
)
QUICK = TiersSize(
    rows=100_000,
    dim=32,
    batch=2_048,
    share=0.3,
    warm_up=10,
    repetitions=MIN_REPETITIONS,
    block=5,
    training=TrainingSize(batch=64, features=4, blocks=1, steps=3, hints=2),
    access=AccessSize(rows=20_000, batch=512, turns=2, batches=2),
)

Keys = NDArray[np.uint64]


def run_tiers(size: TiersSize, *, seed: int = 0) -> Iterator[Figure]:
    """Measures a tiered store in a folder of the system's temporary directory.

    Args:
        size: the sizes of the run; the full run takes about 8 GB of memory and 20 GB of disk.
        seed: the seed of keys and gradients.

    Yields:
        Figures with Zipf-distributed and with uniform keys, then of training, each set when it is complete. At the end
        come those of ``pages`` alone, through the system's cache and past it (``ssd_access.py``).
    """
    random = np.random.default_rng(seed)
    ids = random.permutation(size.rows).astype(np.uint64)
    plain = _server.Store()
    yield _filled(plain, ids, size, "memory")
    for engine in ("pages", "rocksdb"):
        if engine == "pages" or _server.has_rocksdb():
            yield from _engine_figures(engine, plain, ids, size, random)
    yield from access_figures(size.access, _HEAD_BYTES + 2 * size.dim * 4, random)


def _engine_figures(
    engine: str, plain: _server.Store, ids: Keys, size: TiersSize, random: np.random.Generator
) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        budget = _budget(engine, int(plain.used_bytes * size.share), size)
        tiered = _server.Store(memory_budget_bytes=budget, ssd_path=folder, ssd_engine=engine)
        yield _filled(tiered, ids, size, f"{engine}, {size.share:.0%} in memory")
        with _raw(engine, ids, size) as (raw, raw_folder):
            contest = _Contest(engine, (plain, tiered, raw), (Path(folder), raw_folder), size, random, ids)
            yield from contest.figures(f"Zipf({size.exponent})", lambda: ids[_zipf(random, size, size.batch)], True)
            yield from contest.figures(
                "uniform", lambda: random.integers(size.rows, size=size.batch, dtype=np.uint64), False
            )
        shape = (size.training.batch, size.training.features)

        def draw() -> NDArray[np.int64]:
            return ids[_zipf(random, size, shape[0] * shape[1])].astype(np.int64).reshape(shape)

        yield from measure_training(engine, plain, tiered, _TABLE, (size.rows, size.dim), size.training, draw)


def _budget(engine: str, resident: int, size: TiersSize) -> int:
    """Returns the budget with which an engine takes ``resident`` bytes in all; a small run cannot have it equal."""
    beside = _ROCKSDB_BYTES + int(_ROCKSDB_ROW_BYTES * size.rows) if engine == "rocksdb" else 0
    return max(resident - beside, resident // 2)


@contextmanager
def _raw(engine: str, ids: Keys, size: TiersSize) -> Iterator[tuple[_bench.RawSsd, Path]]:
    """Yields an engine alone, with every row, and its folder."""
    with tempfile.TemporaryDirectory() as folder:
        raw = _bench.RawSsd(folder, row_bytes=_HEAD_BYTES + 2 * size.dim * 4, engine=engine)
        parts = np.array_split(_by_slot(ids), max(1, size.rows // 8192))
        for part in _with_progress("fill the engine alone", parts):
            raw.serve(part[:0], part, are_known=False)
        yield raw, Path(folder)


def _filled(store: _server.Store, ids: Keys, size: TiersSize, where: str) -> Figure:
    started = time.perf_counter()
    _fill(store, ids, size)
    rate = len(ids) * 1e-6 / (time.perf_counter() - started)
    return Figure(f"fill {size.rows:,} x {size.dim}, {where}", rate, "M rows/s")


def _fill(store: _server.Store, ids: Keys, size: TiersSize) -> None:
    """Fills a store with rows; ``ids`` are ordered by popularity, and pushed in the opposite
    order where that matters.
    """
    schema = _server.TableSchema(
        id=_TABLE,
        name="bench/tiers",
        dim=size.dim,
        init=_server.InitSpec(kind="uniform", a=-0.05, b=0.05),
        optimizer=_server.OptimizerSpec(kind="adagrad", eps=1e-10),
    )
    grads = np.ones((8192, size.dim), np.float32)
    store.create_table(schema)
    often = int(min(1.0, 2.0 * size.share) * len(ids))
    order = np.concatenate([_by_slot(ids[often:]), ids[:often][::-1]])
    for part in _with_progress("fill", np.array_split(order, max(1, -(-len(order) // len(grads))))):
        store.apply(_TABLE, part, grads[: len(part)], lr=_LR)


def _by_slot(ids: Keys) -> Keys:
    """Returns keys in the order in which the database keeps them."""
    return ids[np.lexsort((ids, _server.slots_of(_TABLE, ids, SLOT_COUNT)))]


Item = TypeVar("Item")


def _with_progress(what: str, items: Sequence[Item]) -> Iterator[Item]:
    with Progress(transient=True, console=Console(stderr=True)) as progress:
        yield from progress.track(items, description=what)


def _zipf(random: np.random.Generator, size: TiersSize, count: int) -> NDArray[np.int64]:
    """Returns ranks drawn with a probability of rank^-exponent, by the inverse of the law's integral."""
    flat = 1.0 - size.exponent
    top = (size.rows + 1.0) ** flat - 1.0
    ranks = (random.random(count) * top + 1.0) ** (1.0 / flat)
    found: NDArray[np.int64] = np.minimum(ranks.astype(np.int64) - 1, size.rows - 1)
    return found


class _Contest:
    def __init__(
        self,
        engine: str,
        contenders: tuple[_server.Store, _server.Store, _bench.RawSsd],
        folders: tuple[Path, Path],
        size: TiersSize,
        random: np.random.Generator,
        ids: Keys,
    ) -> None:
        self._engine = engine
        self._plain, self._tiered, self._raw = contenders
        self._folders, self._size, self._random = folders, size, random
        self._ids = ids
        self._out = np.zeros((size.batch, size.dim), np.float32)
        self._grads = np.full((size.batch, size.dim), 0.1, np.float32)

    def _step(self, store: _server.Store, keys: Keys) -> None:
        out, grads = self._out[: len(keys)], self._grads[: len(keys)]
        store.pull_into(_TABLE, keys, out)
        store.apply(_TABLE, keys, grads, lr=_LR)

    def _moved(self) -> tuple[int, int]:
        return int(self._tier("misses")), int(self._tier("ssd_rows_written"))

    def figures(self, law: str, draw: Callable[[], Keys], is_judged_by_memory: bool) -> list[Figure]:
        """Returns the rates of the tiered store with one law, beside its references."""
        size = self._size
        warm_up = size.warm_up if is_judged_by_memory else size.warm_up // 4
        blocks = [[np.unique(draw()) for _ in range(size.block)] for _ in range(-(-warm_up // size.block))]
        trace = [batch for block in blocks for batch in block]
        for block in _with_progress(f"{law}: warm up", blocks):
            # The database has to be as busy after its reads.
            self._raw_block(self._cold_rows(self._tiered_block(block)))
        self._settle()
        _read_files(self._folders)
        tiered, plain, raw = _Taken(), _Taken(), _Taken()
        misses = 0
        before = self._tiered.tier_stats() or {}
        slowest: list[float] = []
        blocks = [[np.unique(draw()) for _ in range(size.block)] for _ in range(-(-size.repetitions // size.block))]
        measured = [batch for block in blocks for batch in block]
        for block in _with_progress(law, blocks):
            with self._turn(tiered):
                moved = self._tiered_block(block, slowest)
                moved.append(self._room_made())
            with self._turn(plain):
                for batch in block:
                    self._step(self._plain, batch)
            cold = self._cold_rows(moved)
            with self._turn(raw):
                self._raw_block(cold)
            misses += sum(read for read, _ in moved)
        keys = sum(len(each) for block in blocks for each in block)
        rate = keys * 1e-6 / tiered.seconds
        shape = f"{self._engine}, {size.rows:,} x {size.dim}, {size.share:.0%} in memory, {law}"
        evicted_bytes = (self._tier("ssd_bytes_written") - before["ssd_bytes_written"]) or 1.0
        return [
            Figure(f"keys in memory: {shape}", 1.0 - misses / keys, "share"),
            *(self._simulated(trace + measured, len(measured), shape) if is_judged_by_memory else []),
            Figure(f"resident: {shape}", self._resident_bytes() / 2**20, "MiB", higher_is_better=False),
            Figure(
                f"slowest hundredth of batches: {shape}",
                float(np.quantile(slowest, 0.99)) * 1e3,
                "ms",
                higher_is_better=False,
            ),
            *(
                [
                    Figure(
                        f"written to the disk, of evicted rows' bytes: {shape}",
                        (self._tier("ssd_disk_bytes_written") - before["ssd_disk_bytes_written"]) / evicted_bytes,
                        "times",
                        WRITTEN_LIMIT,
                        higher_is_better=False,
                    )
                ]
                if self._engine == "pages"
                else []
            ),
            Figure(
                f"pull + push against all in memory: {shape}",
                rate,
                "M rows/s",
                MEMORY_LIMIT if is_judged_by_memory else None,
                plain.seconds / tiered.seconds,
            ),
            Figure(
                f"pull + push against the engine alone: {shape}",
                rate,
                "M rows/s",
                RAW_LIMIT,
                raw.seconds / tiered.seconds,
            ),
            # The tiered store serves also rows in memory, which the engine alone does not do.
            Figure(
                f"pull + push against the engine and memory together: {shape}",
                rate,
                "M rows/s",
                None,
                (raw.seconds + plain.seconds) / tiered.seconds,
            ),
            *(
                Figure(f"{who}: {what}: {shape}", value / max(1, misses), unit, limit, higher_is_better=False)
                for who, taken in (("store", tiered), ("engine alone", raw))
                for what, value, unit, limit in (
                    ("a row from the SSD and back", taken.seconds * 1e6, "us", None),
                    (
                        "CPU of it",
                        taken.cpu_seconds * 1e6,
                        "us",
                        CPU_LIMITS_US[self._engine] if who == "store" else None,
                    ),
                    ("read from the disk for it", float(taken.disk_bytes), "bytes", None),
                )
            ),
        ]

    @contextmanager
    def _turn(self, taken: _Taken) -> Iterator[None]:
        """Times one block of batches, which begins when both databases are at rest, and adds it up."""
        self._settle()
        disk_bytes, cpu_seconds, seconds = self._disk_bytes(), time.process_time(), time.perf_counter()
        yield
        taken.seconds += time.perf_counter() - seconds
        taken.cpu_seconds += time.process_time() - cpu_seconds
        taken.disk_bytes += self._disk_bytes() - disk_bytes

    def _simulated(self, trace: list[Keys], measured: int, shape: str) -> list[Figure]:
        """Returns what other policies would have in memory, with as many rows and the most popular ones at first."""
        (table,) = self._tiered.stats()
        resident = self._ids[: table.rows - table.ssd_rows][::-1]
        return [
            Figure(
                f"keys in memory by {policy}, simulated: {shape}",
                hit_share(policy, trace, resident, measured),
                "simulated share",
            )
            for policy in _with_progress(f"simulate {', '.join(POLICIES)}", POLICIES)
        ]

    def _resident_bytes(self) -> float:
        return self._tiered.used_bytes + self._tier("ssd_memory_bytes") - self._tier("ssd_index_bytes")

    def _tiered_block(self, block: list[Keys], seconds: list[float] | None = None) -> list[tuple[int, int]]:
        """Runs a block; returns the numbers of rows that each batch read from the SSD and wrote to it."""
        moved = []
        for keys in block:
            before, began = self._moved(), time.perf_counter()
            self._step(self._tiered, keys)
            if seconds is not None:
                seconds.append(time.perf_counter() - began)
            missed, written = (now - then for now, then in zip(self._moved(), before, strict=True))
            moved.append((missed, written))
        return moved

    def _room_made(self) -> tuple[int, int]:
        """Waits until the store has made room for the next batch; returns the rows that it read and wrote meanwhile."""
        before = self._moved()
        while self._tier("is_making_room"):
            time.sleep(1e-4)
        missed, written = (now - then for now, then in zip(self._moved(), before, strict=True))
        return missed, written

    def _raw_block(self, batches: list[tuple[Keys, Keys]]) -> None:
        for reads, writes in batches:
            self._raw.serve(reads, writes, are_known=True)

    def _cold_rows(self, moved: list[tuple[int, int]]) -> list[tuple[Keys, Keys]]:
        return [(self._cold(reads), self._cold(writes)) for reads, writes in moved]

    def _disk_bytes(self) -> int:
        return int(self._tier("ssd_disk_bytes_read")) + self._raw.stats()["disk_bytes_read"]

    def _settle(self) -> None:
        """Waits until no database works after its reads and writes, because that work would fall into the turn of
        another.
        """
        deadline = time.monotonic() + SETTLED_SEC
        while self._tier("ssd_background_jobs") + self._raw.stats()["background_jobs"] > 0:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"bench tiers: the databases were still at work after {SETTLED_SEC:.0f} s")
            time.sleep(0.01)

    def _tier(self, name: str) -> float:
        stats = self._tiered.tier_stats()
        assert stats is not None
        return stats[name]

    def _cold(self, count: int) -> Keys:
        return self._random.integers(self._size.rows, size=count, dtype=np.uint64)


def _read_files(folders: Sequence[Path]) -> None:
    """Reads the files of the folders in turns, so that the cache has as much of each when it cannot hold them all."""
    turns = zip_longest(*(sorted(folder.rglob("*")) for folder in folders))
    paths = [path for turn in turns for path in turn if path is not None]
    for path in _with_progress("files into the system's cache", paths):
        with suppress(OSError), path.open("rb", buffering=0) as file:  # a folder, or a file that was removed meanwhile
            while file.read(1 << 22):
                pass


@dataclass
class _Taken:
    """The sums of all turns of one contender."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    disk_bytes: int = 0
