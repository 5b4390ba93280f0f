"""``bench big_table``: trains the job ``deploy/jobs/big_table.yaml`` on a click log with ten times more rows than fit
in its memory.

The log is made first, in Criteo's layout. Nearly every id of it is new, so that few lines make many rows. Then one
worker trains on it. The figures are the files on the shard's SSD, its resident memory against its budget, and the time
of steps in the second and in the last third of the run.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch.amp.grad_scaler import GradScaler

from ...proto.config.job import JobConfig
from ...proto.control import ControlClient
from ...proto.options.document import load_config
from ...worker.api.connect import connect
from ...worker.api.session import Session
from ...worker.training.process_group import WorkerGroup
from ...worker.training.ps_backend import PsBackend
from ...worker.training.trainer import Trainer
from ..launch.local_cluster import local_cluster
from ..train.training_display import TrainingDisplay
from .harness import Figure

JOB = Path(__file__).resolve().parents[1] / "jobs" / "big_table.yaml"
LIMIT_OF_BUDGET = 1.2
# Beside 1.2 budgets: the process, RocksDB's buffers, cache, filters and indexes, and the frames of a step.
CONSTANT_BYTES = 512 << 20
LIMIT_OF_STEADY = 1.5
_COLUMNS, _NUMBERS = 26, 13
_HOT_IDS = 10_000
_LINES_AT_ONCE = 50_000
_DEADLINE_SEC = 600.0
_SPREAD = np.uint32(0x9E3779B1)  # odd, so that different inputs give different numbers


@dataclass(frozen=True)
class BigTableSize:
    """The sizes of one run.

    Args:
        rows: about how many rows the log makes.
        settings: settings of the job that replace those in its file.
        gigabytes: the size that the files on the SSD must reach; None sets no limit.
        fresh: the share of ids that occur once.
        test_lines: the number of lines for the test at the end.
    """

    rows: int
    settings: tuple[str, ...] = ()
    gigabytes: float | None = None
    fresh: float = 0.95
    test_lines: int = 8192


FULL = BigTableSize(rows=76_000_000, gigabytes=20.0)
QUICK = BigTableSize(
    rows=80_000,
    test_lines=256,
    settings=("train.batch_size=64", "cluster.memory_budget=16MiB", "model.args.rows={'*': 1000000}"),
)


def run_big_table(size: BigTableSize, *, seed: int = 0) -> Iterator[Figure]:
    """Makes the log, trains, and measures; the full one takes 25 GB of the temporary directory's disk.

    Args:
        size: of the run.
        seed: of the log.

    Yields:
        The rate at which the log was made, then the figures of the training.
    """
    random = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = int(size.rows / size.fresh / _COLUMNS)
        began = time.perf_counter()
        write_log(folder / "train.tsv", lines, random, size.fresh)
        write_log(folder / "test.tsv", size.test_lines, random, fresh=0.0)
        yield Figure(f"log of {lines:,} lines", lines * 1e-6 / (time.perf_counter() - began), "M lines/s")
        (folder / "rows").mkdir()
        settings = [f"data.train={folder / 'train.tsv'}", f"data.test={folder / 'test.tsv'}", *size.settings]
        job = load_config(JobConfig, JOB, [*settings, f"cluster.ssd_path={folder / 'rows'}"])
        yield from _train(job, size)


def write_log(path: Path, lines: int, random: np.random.Generator, fresh: float) -> None:
    """Writes a click log in Criteo's layout, tab-separated.

    Args:
        path: the path of the file.
        lines: the number of lines.
        random: draws labels, numbers, and which ids are new.
        fresh: the share of ids that no other line has; the others are Zipf-distributed over a few thousand ids.
    """
    digits = np.frombuffer(b"".join(b"%04x" % value for value in range(1 << 16)), np.uint8).reshape(-1, 4)
    with path.open("wb") as file:
        for begin in range(0, lines, _LINES_AT_ONCE):
            count = min(_LINES_AT_ONCE, lines - begin)
            new = (np.arange(begin, begin + count, dtype=np.uint32) * _SPREAD)[:, None]
            hot = np.minimum(random.zipf(1.2, (count, _COLUMNS)), _HOT_IDS).astype(np.uint32)
            ids = np.where(random.random((count, _COLUMNS)) < fresh, new, (np.uint32(0) - hot) * _SPREAD)
            text = np.full((count, 2 + 2 * _NUMBERS + 9 * _COLUMNS), ord("\t"), np.uint8)
            text[:, 0] = random.integers(ord("0"), ord("2"), count)
            text[:, 2 : 2 + 2 * _NUMBERS : 2] = random.integers(ord("0"), ord("9") + 1, (count, _NUMBERS))
            tokens = text[:, 2 + 2 * _NUMBERS :].reshape(count, _COLUMNS, 9)
            tokens[:, :, :4], tokens[:, :, 4:8] = digits[ids >> 16], digits[ids & 0xFFFF]
            text[:, -1] = ord("\n")
            file.write(text.tobytes())


class _TimedBackend(PsBackend):
    """A training backend that notes when each step ends."""

    def __init__(self, job: JobConfig, session: Session, coordinator: str) -> None:
        super().__init__(job, session, coordinator)
        self.ends: list[float] = []

    def step(self, scaler: GradScaler | None) -> bool:
        """Steps as the base class does, and notes the time."""
        is_taken = super().step(scaler)
        self.ends.append(time.perf_counter())
        return is_taken


class _Resident:
    """Measures the largest resident memory of a process while the block runs."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.most = 0

    def __enter__(self) -> _Resident:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.5):
            for line in self._status.read_text().splitlines():
                if line.startswith("VmRSS:"):
                    self.most = max(self.most, int(line.split()[1]) << 10)


def _train(job: JobConfig, size: BigTableSize) -> Iterator[Figure]:
    cluster_config = job.cluster
    budget = cluster_config.memory_budget
    assert budget is not None
    with (
        local_cluster(shards=1, memory_budget=budget, ssd_path=cluster_config.ssd_path) as cluster,
        _Resident(cluster.shard_pids[0]) as resident,
        connect(cluster.address, job.name, staleness=job.train.staleness, deadline_sec=_DEADLINE_SEC) as session,
        TrainingDisplay(job.train.epochs) as display,
    ):
        backend = _TimedBackend(job, session, cluster.address)
        result = Trainer(job, group=WorkerGroup(), backend=backend, observer=display).run()
        with ControlClient(cluster.address) as client:
            shard = client.status().shards[0]
    allowed = LIMIT_OF_BUDGET * budget + CONSTANT_BYTES
    keys = max(1.0, result.tiers["hits"] + result.tiers["misses"])
    yield Figure("rows of all tables", float(result.rows), "rows")
    yield Figure("files on the SSD", shard.tier.file_bytes * 1e-9, "GB", size.gigabytes)
    yield Figure("budget of memory", budget / 2**30, "GiB")
    yield Figure("used of it at the end", shard.used_bytes / 2**30, "GiB", 1.0, shard.used_bytes / budget, False)
    name = f"resident memory at most, of {LIMIT_OF_BUDGET} budgets + {CONSTANT_BYTES >> 20} MiB"
    yield Figure(name, resident.most / 2**30, "GiB", 1.0, resident.most / allowed, False)
    yield Figure("keys of pulls and commits in memory", result.tiers["hits"] / keys, "share")
    yield Figure("training", result.samples_per_sec, "samples/s")
    yield from _step_figures(np.diff(backend.ends))


def _step_figures(seconds: NDArray[np.float64]) -> Iterator[Figure]:
    parts = np.array_split(seconds, 3)
    p99 = [float(np.percentile(part, 99)) if len(part) else 0.0 for part in parts]
    yield Figure("p50 of a step", float(np.median(seconds)) * 1e3, "ms", higher_is_better=False)
    yield Figure("p99 of a step, second third", p99[1] * 1e3, "ms", higher_is_better=False)
    yield Figure(
        "p99 of a step, last third, of the second", p99[2] * 1e3, "ms", LIMIT_OF_STEADY, p99[2] / p99[1], False
    )
