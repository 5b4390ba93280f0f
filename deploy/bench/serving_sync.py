"""Measures what live sync costs a training job, and how fresh serving is meanwhile.

The job is that of ``bench train`` (1-hot, one shard, one worker, staleness 0). It runs with and without a serving
process that follows it, in turns. Then, for information, a loop runs that only pushes, which no training job does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import grpc
import numpy as np

from ...proto import serving_pb2 as pb, serving_pb2_grpc as pb_grpc
from ...proto.optim import SGD
from ...proto.process.cores import available_cores
from ...proto.status.figures import step_quantile
from ...worker.api.connect import connect
from ..launch.local_cluster import local_cluster
from ..launch.local_serving import LocalServing, local_serving
from .click_model import DIM, TABLES, ZipfBatches, distributed_step
from .harness import Figure, median, process_cpu
from .serving_saturation import Size

_BATCHES = 50  # number of batches that are made before the clock runs, and used in turns
_NAMESPACE = "bench"
_BROUGHT_DEADLINE_SEC = 30.0


@dataclass
class _Turns:
    """The results of turns of one kind: units of work per second, and CPU milliseconds per unit of each process."""

    rates: list[float] = field(default_factory=list)
    trainer_ms: list[float] = field(default_factory=list)
    shard_ms: list[float] = field(default_factory=list)
    serving_ms: list[float] = field(default_factory=list)

    def run(self, work: Callable[[], None], seconds: float, shards: Sequence[int], serving: Sequence[int] = ()) -> None:
        count, begun = 0, time.monotonic()
        before = (time.process_time(), _cpu(shards), _cpu(serving))
        while time.monotonic() - begun < seconds:
            work()
            count += 1
        now = (time.process_time(), _cpu(shards), _cpu(serving))
        self.rates.append(count / (time.monotonic() - begun))
        for each, since, until in zip((self.trainer_ms, self.shard_ms, self.serving_ms), before, now, strict=True):
            each.append((until - since) * 1e3 / count)


def live_sync(size: Size) -> Iterator[Figure]:
    """Yields all figures; see the docstring of the module."""
    train = size.train
    made = ZipfBatches(train, 1)
    batches = [made.make() for _ in range(_BATCHES)]
    taken = 0
    with local_cluster(shards=1) as cluster, connect(cluster.address, _NAMESPACE) as session:
        step = distributed_step(train, session)

        def work() -> None:
            nonlocal taken
            step(batches[taken % _BATCHES])
            taken += 1

        alone, followed, synced, behind = _in_turns(work, cluster.address, cluster.shard_pids, size)
    job = f"{TABLES} tables of {train.rows:,} x {DIM}, batch {train.batch}"
    ratio = median([on / off for on, off in zip(followed.rates, alone.rates, strict=True)])
    yield Figure("freshness p99 while a model trains, at most", behind, "s", limit=1.5, higher_is_better=False)
    rate, cpus = median(followed.rates), available_cores()
    busy = rate * (median(followed.trainer_ms) + median(followed.shard_ms)) / 1e3
    more_ms = median(followed.shard_ms) - median(alone.shard_ms)
    share = rate * (median(followed.serving_ms) + max(0.0, more_ms)) / 1e3 / cpus
    # Where no core is left to live sync, it takes from training the time that it runs, and no more than that.
    limit = 0.95 if busy + 1 <= cpus else 1 - share
    yield Figure(f"training with live sync: {job}", rate * train.batch, "samples/s", limit=limit, ratio=ratio)
    yield Figure(f"CPU of live sync, of {cpus} CPUs", 100 * share, "%", higher_is_better=False)
    yield Figure("training without", median(alone.rates) * train.batch, "samples/s")
    yield Figure("rows that live sync brings while it trains", median(synced) / 1e3, "k rows/s")
    for name, turns in (("with live sync", followed), ("without", alone)):
        yield Figure(f"CPU of the trainer {name}", median(turns.trainer_ms), "ms/step", higher_is_better=False)
        yield Figure(f"CPU of the shard {name}", median(turns.shard_ms), "ms/step", higher_is_better=False)
    yield Figure("CPU of the serving process", median(followed.serving_ms), "ms/step", higher_is_better=False)
    yield from _pushes_alone(size)


def _pushes_alone(size: Size) -> Iterator[Figure]:
    """Yields figures with a client that only pushes random rows, as fast as two shards accept them."""
    with local_cluster(shards=2) as cluster, connect(cluster.address, _NAMESPACE, staleness=None) as session:
        table = session.create_table("rows", dim=size.dim, optimizer=SGD(lr=0.01))
        random = np.random.default_rng(3)
        grads = random.standard_normal((size.keys, size.dim)).astype(np.float32)

        def work() -> None:
            table.push(random.integers(0, size.table_rows, size.keys).astype(np.uint64), grads)

        alone, followed, _, behind = _in_turns(work, cluster.address, cluster.shard_pids, size)
    ratio = median([on / off for on, off in zip(followed.rates, alone.rates, strict=True)])
    name = f"pushes of {size.keys} rows, nothing else"
    yield Figure(f"{name}: with live sync", median(followed.rates), "pushes/s", ratio=ratio)
    yield Figure(f"{name}: without", median(alone.rates), "pushes/s")
    yield Figure(f"{name}: freshness p99, at most", behind, "s", higher_is_better=False)


def _in_turns(
    work: Callable[[], None], coordinator: str, shards: Sequence[int], size: Size
) -> tuple[_Turns, _Turns, list[float], float]:
    """Runs turns without and with a follower, which has caught up before the clock of its turn runs.

    Returns the turns, the rows per second that the follower received, and the p99 of freshness in its turns.
    """
    alone, followed, warm = _Turns(), _Turns(), _Turns()
    synced: list[float] = []
    ages: dict[float, int] = {}
    warm.run(work, size.sync_sec / 2, shards)
    for _ in range(size.sync_turns):
        alone.run(work, size.sync_sec, shards)
        with local_serving("now", follow=coordinator, namespace=_NAMESPACE) as serving:
            warm.run(work, size.sync_sec / 4, shards)
            before, begun = describe(serving), time.monotonic()
            followed.run(work, size.sync_sec, shards, serving.pids)
            now = _brought(serving, before)
            rows = now.versions[0].rows_synced - before.versions[0].rows_synced
            synced.append(rows / (time.monotonic() - begun))
        for bucket, since in zip(now.freshness, before.freshness, strict=True):
            ages[bucket.at_most_sec] = ages.get(bucket.at_most_sec, 0) + bucket.slots - since.slots
    return alone, followed, synced, percentile(ages, 0.99)


def _brought(serving: LocalServing, before: pb.DescribeReply) -> pb.DescribeReply:
    """Returns what the process reports once it has received something, which a short turn on a busy machine may not
    show.
    """
    deadline = time.monotonic() + _BROUGHT_DEADLINE_SEC
    while True:
        now = describe(serving)
        rows = now.versions[0].rows_synced - before.versions[0].rows_synced
        if (rows > 0 and _slots(now) > _slots(before)) or time.monotonic() > deadline:
            return now
        time.sleep(0.05)


def _slots(reply: pb.DescribeReply) -> int:
    return sum(bucket.slots for bucket in reply.freshness)


def _cpu(pids: Sequence[int]) -> float:
    return float(sum(process_cpu(pid) for pid in pids))


def describe(serving: LocalServing) -> pb.DescribeReply:
    """Returns what the first process serves."""
    with grpc.insecure_channel(serving.addresses[0]) as channel:
        return pb_grpc.ServingStub(channel).Describe(pb.DescribeRequest(), timeout=10)


def percentile(counts: dict[float, int], share: float) -> float:
    """Returns the smallest bound below which the share lies; nan when there is nothing."""
    bounds = sorted(counts)
    found = step_quantile(bounds, [counts[bound] for bound in bounds], share)
    return float("nan") if found is None else found
