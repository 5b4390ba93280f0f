"""``bench loop``: measures how long an event of a topic takes until serving answers with what was learnt from it.

A process produces events of 26 ids at a rate to a mock cluster of Kafka, which it runs; a job trains on them; a serving
process follows its rows. Ten times a second an event has an id that no other has. The time from its production until a
lookup finds the row of that id is measured: topic, batch, commit, live sync, lookup. What the first seconds of a run
take, in which a worker makes its first steps and serving learns of its tables, is a figure of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from ...proto.control import ControlClient
from ...proto.errors import FailedPrecondition, NotFound
from ...proto.row_keys import hash_key
from ...serving.client.client import ServingClient
from ..launch.local_cluster import local_cluster
from ..launch.local_serving import local_serving
from .harness import Figure
from .processes import first_word, spawned

_IDS = 26
_ROWS = 2**44  # so that no two ids have one row
_TABLE = "embeddings.tables.C1"
_TOPICS = ("loop0", "loop1", "loop2", "loop3")
_PARTITIONS = 4  # of each, which is what the mock cluster makes; it keeps 5 MB of a partition
_BATCH_SEC = 0.005
_PROBE_SEC = 0.1
_LOOK_SEC = 0.002
_START_SEC = 120.0
_LIMIT_SEC = 1.0


@dataclass(frozen=True)
class Size:
    """Events a second, ids that they draw from, and the seconds before and of the measurement."""

    rate: int = 5_000
    ids: int = 20_000
    warmup: float = 6.0
    seconds: float = 30.0


FULL = Size()
QUICK = Size(rate=500, ids=1_000, warmup=3.0, seconds=4.0)


def run_loop(size: Size) -> Sequence[Figure]:
    """Returns the times from an event to its served row, the events that were trained on, and those that are left.

    Raises:
        FailedPrecondition: the job did not begin, or no row was served in time.
    """
    with tempfile.TemporaryDirectory() as name, spawned(_produce, (size,)) as producer:
        brokers = str(first_word(producer))
        folder = Path(name)
        _write_job(folder, brokers, size)
        with local_cluster(shards=1) as cluster, _trained(folder, cluster.address) as run:
            _wait_for_table(cluster.address, run)
            with (
                local_serving("loop", follow=cluster.address, namespace="loop") as serving,
                ServingClient(serving.addresses, model="loop") as client,
            ):
                producer.send("begin")
                begin = time.monotonic()
                first, taken, lacking = _measure(producer, client, size)
            with ControlClient(cluster.address) as control:
                (job,) = (each for each in control.status().jobs if each.name == "loop")
            seconds = time.monotonic() - begin
    words = f"loop: {size.rate:,} events/s of {_IDS} ids"
    events = job.stream.counts.events
    return [
        Figure(f"{words}: from the first event to its served row", first, "s", higher_is_better=False),
        Figure(f"{words}: from event to served row, p50", float(np.percentile(taken, 50)), "s", higher_is_better=False),
        Figure(
            f"{words}: from event to served row, p99",
            float(np.percentile(taken, 99)),
            "s",
            _LIMIT_SEC,
            higher_is_better=False,
        ),
        Figure(f"{words}: events whose row was not served", float(lacking), "events", 0.0, higher_is_better=False),
        Figure(f"{words}: trained on", events / seconds, "events/s"),
        Figure(f"{words}: not read yet at the end", float(job.stream.lag), "events", higher_is_better=False),
    ]


def _event(random: np.random.Generator, size: Size, first: str | None = None) -> bytes:
    ids = random.zipf(1.2, _IDS) % size.ids
    columns = {f"C{number}": str(value) for number, value in enumerate(ids.tolist(), start=1)}
    if first is not None:
        columns["C1"] = first
    return json.dumps({**columns, "click": int(ids[0] % 2)}).encode()


def _produce(parent: Connection, size: Size) -> None:
    """Runs the mock cluster, and produces until the pipe closes; sends the number and time of each marked event."""
    try:
        from confluent_kafka import Producer
    except ImportError as error:
        raise SystemExit(f"bench loop: {error}") from None

    producer = Producer(
        {
            "bootstrap.servers": "",
            "test.mock.num.brokers": 1,
            "linger.ms": 1000 * _BATCH_SEC,
            "log_level": 3,
            "queue.buffering.max.messages": 1_000_000,
        }
    )
    brokers = ",".join(f"{each.host}:{each.port}" for each in producer.list_topics(timeout=10).brokers.values())
    random = np.random.default_rng(1)
    made = [_event(random, size) for _ in range(20_000)]
    for topic in _TOPICS:
        producer.list_topics(topic, timeout=10)  # which makes it
    producer.produce(_TOPICS[0], made[0], partition=0)
    producer.flush(10)
    parent.send(brokers)
    parent.recv()
    begin = time.monotonic()
    count = probes = 0
    while not parent.poll():
        now = time.monotonic() - begin
        # A producer of Kafka fills one batch before it begins another one's (KIP-480). And the mock cluster looks
        # through the batches of a partition for a position, so that with one event in each it would slow down.
        turn = int(now / _BATCH_SEC)
        topic, partition = _TOPICS[turn % len(_TOPICS)], turn // len(_TOPICS) % _PARTITIONS
        while count < now * size.rate:
            producer.produce(topic, made[count % len(made)], partition=partition)
            count += 1
        while probes < now / _PROBE_SEC:
            marked = _event(random, size, f"probe{probes}")
            producer.produce(topic, marked, partition=partition)
            parent.send((probes, time.monotonic()))
            probes += 1
        producer.poll(0.002)


def _write_job(folder: Path, brokers: str, size: Size) -> None:
    random = np.random.default_rng(0)
    (folder / "like.jsonl").write_bytes(b"\n".join(_event(random, size) for _ in range(100)) + b"\n")
    like = str(folder / "like.jsonl")
    # Because the mock cluster answers a fetch that finds nothing after this time, whatever comes meanwhile.
    kafka = {"brokers": brokers, "topics": list(_TOPICS), "options": {"fetch.wait.max.ms": 20}}
    job = {
        "name": "loop",
        "data": {
            "format": "jsonl",
            "columns": {"label": "click"},
            "stream": {"kafka": kafka, "like": like, "max_wait": "50ms"},
            "test": like,
        },
        "features": {f"C{number}": {"kind": "id"} for number in range(1, _IDS + 1)},
        "model": {"class": "DeepFM", "args": {"rows": {"*": _ROWS}, "dim": 16, "hidden": [64]}, "min_rows": 1},
        "train": {"batch_size": 1024, "dense": "ps", "staleness": None, "elastic": {}, "threads": 1},
    }
    (folder / "job.yaml").write_text(json.dumps(job))


@contextmanager
def _trained(folder: Path, address: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the job for the time of the block."""
    words = [sys.executable, "-m", "sparserow.deploy.cli", "train", "job.yaml", "--set", f"cluster.address={address}"]
    run = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL)
    try:
        yield run
    finally:
        run.terminate()
        try:
            run.wait(60)
        finally:
            run.kill()


def _wait_for_table(address: str, run: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SEC
    with ControlClient(address) as control:
        while not any(schema.name == _TABLE for schema in control.status().tables):
            if run.poll() is not None or time.monotonic() > deadline:
                raise FailedPrecondition("bench loop: the job did not begin; its message is on stderr")
            time.sleep(0.1)


def _measure(producer: Connection, client: ServingClient, size: Size) -> tuple[float, list[float], int]:
    """Returns the seconds until their rows are served of the first marked event and of those after the warm-up.

    The third value is the number of the latter ones whose rows are not served.
    """
    taken: dict[int, float] = {}
    left: dict[int, float] = {}
    first_measured = round(size.warmup / _PROBE_SEC)
    end = time.monotonic() + size.warmup + size.seconds
    while (now := time.monotonic()) < end or (left and now < end + 10 * _LIMIT_SEC):
        while producer.poll():
            number, at = producer.recv()
            if now < end:
                left[number] = at
        if left:
            try:
                keys = np.array([hash_key(f"probe{number}") % _ROWS for number in left], np.uint64)
                found = client.lookup(_TABLE, keys).found
            except NotFound:  # the serving process does not know the table yet
                found = np.zeros(len(left), np.bool_)
            seen = time.monotonic()
            for number in [number for number, there in zip(list(left), found, strict=True) if there]:
                taken[number] = seen - left.pop(number)
        time.sleep(_LOOK_SEC)
    measured = [seconds for number, seconds in taken.items() if number >= first_measured]
    if 0 not in taken or not measured:
        raise FailedPrecondition(f"bench loop: of {len(taken) + len(left)} events {len(taken)} were served in time")
    return taken[0], measured, sum(number >= first_measured for number in left)
