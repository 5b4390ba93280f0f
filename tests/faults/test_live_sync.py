"""Live sync under faults: links are cut, both sides are killed, shards come back from earlier checkpoints. Afterwards
every serving row equals the training row, none is missing, and none that was deleted is there. Minutes of it with
SPARSEROW_TEST_FULL=1."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator

import numpy as np
import pytest

from long_form import FULL
from sparserow.cpp_ext import _server
from sparserow.proto.errors import FailedPrecondition
from sparserow.proto.optim import SGD
from sparserow.proto.schema import TableSchema, Uniform
from sparserow.serving.client.shard_assignment import ShardAssignment
from sparserow.serving.follow_options import NO_THRESHOLD, FollowOptions, ThresholdOptions
from sparserow.serving.live_sync import Follower
from sparserow.serving.loaded_version import LoadedVersion, ServedTable, with_tables
from sparserow_process import DEADLINE_SEC, wait_until
from training_side import TrainingSide, rows_of

SECONDS = 180.0 if FULL else 6.0
LEAST_ACTS = 400
DIM = 8
SCHEMAS = [
    TableSchema("ads", "user", DIM, SGD(), init=Uniform(-1, 1), id=11),
    TableSchema("ads", "item", DIM, SGD(), id=12),
]


@pytest.fixture
def side() -> Iterator[TrainingSide]:
    made = TrainingSide(SCHEMAS, log_bytes=40_000)
    yield made
    made.close()


def empty_version(side: TrainingSide) -> LoadedVersion:
    tables = {schema.name: ServedTable(schema, "float32") for schema in SCHEMAS}
    store = with_tables(_server.Store(slot_count=side.slot_count), tables)
    return LoadedVersion("ctr", 1, side.cluster_id, "ads", tables, store, np.zeros(side.slot_count, np.uint64))


class ServingSide:
    """A process's version and follower; killed, it begins anew from what it had when it was last saved."""

    def __init__(self, side: TrainingSide, place: ShardAssignment, threshold: ThresholdOptions = NO_THRESHOLD) -> None:
        self.side, self.place, self.threshold = side, place, threshold
        self.saved: tuple[dict[int, tuple], np.ndarray] = ({}, np.zeros(side.slot_count, np.uint64))
        self.version = empty_version(side)
        self.start()

    def start(self) -> None:
        name = f"test/{self.place.shard}"
        options = FollowOptions(self.side.address, name, interval_sec=0.01, retry_sec=0.05, threshold=self.threshold)
        self.follower = Follower(self.version, self.place.owned(self.side.slot_count), options)

    def publish(self) -> None:
        """What a published version is: slot versions first, then rows that have at least these."""
        slots = np.zeros(self.side.slot_count, np.uint64)
        rows: dict[int, list] = {schema.id: [] for schema in SCHEMAS}
        for shard, store in enumerate(self.side.stores):
            mine = self.side.owners == shard
            slots[mine] = store.change_versions()[mine]
            for schema in SCHEMAS:
                rows[schema.id].append(store.scan(schema.id, max_rows=1 << 20)[:4])
        self.saved = ({table: tuple(rows[table]) for table in rows}, slots)

    def kill_and_restart(self) -> None:
        self.follower.close()
        self.version = empty_version(self.side)
        owned = self.place.owned(self.side.slot_count)
        for table, scans in self.saved[0].items():
            for keys, versions, _, values in scans:
                mine = owned[_server.slots_of(table, keys, self.side.slot_count)]
                self.version.store.assign_versions(table, keys[mine], versions[mine], values[mine])
        self.version.slots[:] = self.saved[1]
        self.start()


def test_every_row_is_right_after_random_faults(side: TrainingSide) -> None:
    seed = int(os.environ.get("SPARSEROW_TEST_SEED", secrets.randbits(32)))
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    thresholds = (
        NO_THRESHOLD,
        ThresholdOptions(updates=3, longest_sec=0.5),
        ThresholdOptions(move=0.2, longest_sec=0.5),
    )
    serving = [ServingSide(side, ShardAssignment(shard, 3), each) for shard, each in enumerate(thresholds)]
    saved = [side.save(shard) for shard in range(side.shards)]
    acts: dict[str, int] = {}
    end = time.monotonic() + SECONDS
    while time.monotonic() < end or sum(acts.values()) < LEAST_ACTS or "cut" not in acts:
        table = int(rng.choice([11, 12]))
        keys = np.unique(rng.integers(0, 5000, size=int(rng.choice([1, 50, 400])), dtype=np.uint64))
        grads = rng.standard_normal((len(keys), DIM), np.float32)
        if rng.random() < 0.75:
            side.push(table, keys, grads)
        else:
            side.erase(table, keys)
        fault = rng.random()
        shard, process = int(rng.integers(side.shards)), serving[int(rng.integers(3))]
        name = ""
        if fault < 0.02:
            name = "cut"
            side.cut(shard)
        elif fault < 0.06:
            side.connect(shard)
        elif fault < 0.07:
            name = "serving killed"
            process.kill_and_restart()
        elif fault < 0.08:
            name = "training restored"
            side.kill_and_restore(shard, saved[shard])
        elif fault < 0.09:
            saved[shard] = side.save(shard)
        elif fault < 0.1:
            process.publish()
        acts[name] = acts.get(name, 0) + 1
        time.sleep(0.002)
    for shard in range(side.shards):
        side.connect(shard)
    quiet = time.monotonic()

    def have_all() -> bool:
        return all(process.follower.behind_sec < time.monotonic() - quiet for process in serving)

    wait_until(have_all, f"the followers: {[process.follower.problem for process in serving]}")

    def served() -> dict[tuple[int, int], bytes]:
        return {key: row for process in serving for key, row in rows_of(process.version.store, SCHEMAS).items()}

    wait_until(lambda: served() == side.rows(), "rows that waited")
    got = served()
    stats = [process.follower.stats() for process in serving]
    print(f"{acts}; {len(got)} rows; {[(s.rows, s.unchanged, s.erased, s.reopened) for s in stats]}")
    assert len(got) > 500
    for process in serving:
        process.follower.close()


def test_freshness_is_counted(side: TrainingSide) -> None:
    serving = ServingSide(side, ShardAssignment())
    wait_until(lambda: serving.follower.is_complete, "the first pages")
    keys = np.arange(200, dtype=np.uint64)
    side.push(11, keys, np.ones((200, DIM), np.float32))
    wait_until(lambda: serving.follower.stats().rows == 200, "the rows")
    stats = serving.follower.stats()
    assert sum(stats.freshness) > 0
    assert 0 < stats.freshness_sum_sec < sum(stats.freshness) * DEADLINE_SEC
    serving.follower.close()


def test_what_a_follower_catches_up_with_is_no_freshness(side: TrainingSide) -> None:
    keys = np.arange(200, dtype=np.uint64)
    side.push(11, keys, np.ones((200, DIM), np.float32))
    time.sleep(0.3)
    serving = ServingSide(side, ShardAssignment())
    wait_until(lambda: serving.follower.is_complete and serving.follower.stats().rows == 200, "the first pages")
    assert sum(serving.follower.stats().freshness) == 0, "a process that begins late has old changes to catch up with"
    for shard in range(side.shards):  # and one that was cut off did not serve them in time
        side.cut(shard)
    side.push(11, keys, np.ones((200, DIM), np.float32))
    time.sleep(0.6)
    for shard in range(side.shards):
        side.connect(shard)
    wait_until(lambda: serving.follower.stats().rows == 400, "the rows of the outage")
    stats = serving.follower.stats()
    assert sum(stats.freshness) > 0
    assert stats.freshness_sum_sec > 0.3 * sum(stats.freshness)
    serving.follower.close()


def test_another_cluster_or_schema_is_refused(side: TrainingSide) -> None:
    version = empty_version(side)
    version.cluster_id = 99
    owned = ShardAssignment().owned(side.slot_count)
    options = FollowOptions(side.address, "test")
    with pytest.raises(FailedPrecondition, match="was trained by cluster 0000000000000063, not by 0000000000001234"):
        Follower(version, owned, options)
    version = empty_version(side)
    wider = TableSchema("ads", "user", DIM + 1, SGD(), id=11)
    version.tables = {"user": ServedTable(wider, "float32")}
    with pytest.raises(FailedPrecondition, match="ads/user has dim 8 and schema version 1 there; publish it"):
        Follower(version, owned, options)
    version.tables = {"gone": ServedTable(TableSchema("ads", "gone", 4, SGD(), id=5), "float32")}
    with pytest.raises(FailedPrecondition, match="table ads/gone is not there any more"):
        Follower(version, owned, options)
