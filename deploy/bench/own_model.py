"""``bench own_model``: trains a class by its job file, with histories as lists, by two worker processes and two shards.

The reference is the same job in plain torch: two processes with DDP and local layers with sparse gradients, whose
gradients are averaged over the processes. Both read the same log, and take turns. Bytes are counted by the shards, over
a run without prefetch and without cache, and set beside the keys of the batches: each worker pulls and pushes each key
of its batch once in a step, with 8 bytes for the key and 4 for each column.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...proto.config.job import JobConfig
from ...proto.control import ControlClient
from ...proto.options.document import load_config
from ...worker.data import Batch, ReadOptions, SalesLog, write_sales_log
from ...worker.data.sources import fit_features, open_reader
from ...worker.training.run_identity import RunIdentity
from ..launch.local_cluster import LocalCluster, local_cluster
from ..train.job_workers import run_job_workers
from .harness import Figure

LIMIT_OF_BYTES = 1.05
LIMIT_OF_TORCH = 0.9
WORKERS = SHARDS = 2
_JOB = Path(__file__).resolve().parents[1] / "jobs" / "din.yaml"


@dataclass(frozen=True)
class OwnModelSize:
    """The sizes of the log and of the model.

    Attributes:
        rows: the number of rows of each table.
        users, items: the numbers of users and items of the log.
        history: the mean length of a history.
        dim: the number of columns of a row.
        batch: the number of samples of a step of a worker.
        steps: the number of steps.
        runs: the number of runs of each contender.
    """

    rows: int
    users: int
    items: int
    history: int
    dim: int
    batch: int
    steps: int
    runs: int


FULL = OwnModelSize(1 << 18, users=100_000, items=100_000, history=50, dim=32, batch=2048, steps=100, runs=3)
QUICK = OwnModelSize(1_000, users=200, items=200, history=10, dim=32, batch=128, steps=6, runs=1)


def run_own_model(size: OwnModelSize) -> Iterator[Figure]:
    """Yields the bytes on the wire and the rates, each with its reference."""
    with tempfile.TemporaryDirectory() as folder:
        log = write_sales_log(
            Path(folder),
            rows=WORKERS * size.batch * size.steps,
            test_rows=16,
            users=size.users,
            items=size.items,
            history=size.history,
        )
        yield from _measure(size, log)


def _measure(size: OwnModelSize, log: SalesLog) -> Iterator[Figure]:
    name = f"own model, DIN, {size.history} items a history, dim {size.dim}, batch {size.batch}, {WORKERS} workers"
    plain = _job(size, log, "train.prefetch=0")
    with local_cluster(shards=SHARDS) as cluster:
        before = _bytes(cluster)
        _rate(plain, cluster.address)
        received, sent = (after - first for after, first in zip(_bytes(cluster), before, strict=True))
    keys = _unique_keys(plain, size)
    floor = 2 * keys * (8 + 4 * size.dim)
    yield Figure(f"{name}: unique keys", keys / size.steps / WORKERS, "keys/step")
    yield Figure(f"{name}: to the shards", received / size.steps / WORKERS / 1e6, "MB/step", higher_is_better=False)
    yield Figure(f"{name}: from the shards", sent / size.steps / WORKERS / 1e6, "MB/step", higher_is_better=False)
    total = received + sent
    yield Figure(
        f"{name}: both ways, of twice (8 + 4 dim) a key",
        total / size.steps / WORKERS / 1e6,
        "MB/step",
        LIMIT_OF_BYTES,
        total / floor,
        higher_is_better=False,
    )
    ahead = _job(size, log, "train.prefetch=2")
    local = _job(size, log, "train.prefetch=0", "model.backend=local", "cluster={}")
    turns = {"torch": local, "ahead": ahead, "without": plain}
    rates: dict[str, list[float]] = {kind: [] for kind in turns}
    for run in range(size.runs):
        for kind in list(turns)[:: 1 if run % 2 == 0 else -1]:
            if kind == "torch":
                rates[kind].append(_rate(turns[kind], None))
            else:
                with local_cluster(shards=SHARDS) as cluster:
                    rates[kind].append(_rate(turns[kind], cluster.address))
    torch_rate = statistics.median(rates["torch"])
    yield Figure(f"{name}: DDP and local layers", torch_rate, "samples/s")
    for kind, words, limit in (("ahead", "prefetch 2", LIMIT_OF_TORCH), ("without", "no prefetch", None)):
        rate = statistics.median(rates[kind])
        yield Figure(f"{name}: {words}, of DDP and local layers", rate, "samples/s", limit, rate / torch_rate)


def _job(size: OwnModelSize, log: SalesLog, *sets: str) -> JobConfig:
    return load_config(
        JobConfig,
        _JOB,
        [
            f"data.train={log.train}",
            f"data.test={log.test}",
            "data.columns={label: click}",
            f"model.args.rows={{user: {size.rows}, item: {size.rows}}}",
            f"model.args.dim={size.dim}",
            "model.min_rows=1",
            f"features.history.max_len={4 * size.history}",
            f"train.batch_size={size.batch}",
            f"train.workers={WORKERS}",
            "train.threads=1",
            "publish.local=null",
            *sets,
        ],
    )


def _rate(job: JobConfig, coordinator: str | None) -> float:
    result = run_job_workers(job, workers=WORKERS, coordinator=coordinator, identity=RunIdentity.new())
    return result.samples_per_sec


def _bytes(cluster: LocalCluster) -> tuple[int, int]:
    """Returns the bytes that the shards have received and sent."""
    with ControlClient(cluster.address) as client:
        loads = [shard.load for shard in client.status().shards]
    return sum(load.bytes_received for load in loads), sum(load.bytes_sent for load in loads)


def _unique_keys(job: JobConfig, size: OwnModelSize) -> int:
    """Returns the number of rows that the batches of all workers name, each once in a worker's step."""
    features, total = fit_features(job.data), 0
    for rank in range(WORKERS):
        options = ReadOptions(
            size.batch, rank, WORKERS, shuffle=True, shuffle_rows=job.data.shuffle_rows, seed=job.train.seed
        )
        for batch in open_reader(job.data, "train", features, options):
            assert isinstance(batch, Batch)
            total += _rows(batch, ("item", "history"), size.rows) + _rows(batch, ("user",), size.rows)
    return total


def _rows(batch: Batch, features: Sequence[str], rows: int) -> int:
    """Returns the number of unique rows of features that read one table."""
    values = [batch.tensors[name] for name in features]
    keys = [value.numpy() if not isinstance(value, tuple) else value[0].numpy() for value in values]
    return len(np.unique(np.concatenate(keys) % rows))
