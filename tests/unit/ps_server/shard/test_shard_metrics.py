"""What a parameter server exports: the histogram of the staleness that happened, by table."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from shard_engine import lone_engine
from sparserow.cpp_ext import _client, _server
from sparserow.proto import control_pb2 as pb
from sparserow.proto.optim import SGD
from sparserow.proto.schema import TableSchema
from sparserow.ps_server.shard.engine import ShardEngine
from sparserow.ps_server.shard.metrics import ShardMetrics

SLOTS = 1024
TABLE = TableSchema("ads", "user", 2, SGD(lr=1.0), id=_server.id_of_name("ads/user"), version=1)


@pytest.fixture
def engine() -> Iterator[ShardEngine]:
    with lone_engine(slot_count=SLOTS) as engine:
        engine.create_tables([TABLE])
        yield engine


def exported(engine: ShardEngine) -> dict[str, float]:
    """Of ``sparserow_ps_table_pull_staleness``: pulls up to each bound, and their sum."""
    registry = CollectorRegistry()
    registry.register(ShardMetrics(engine, 0))
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            if sample.name.startswith("sparserow_ps_table_pull_staleness"):
                assert (sample.labels["shard"], sample.labels["table"]) == ("0", TABLE.full_name)
                found[sample.labels.get("le", sample.name.rpartition("_")[2])] = sample.value
    return found


def test_each_pull_counts_by_how_far_it_lagged(engine: ShardEngine) -> None:
    members = [pb.JobMember(worker_id=worker, epoch=1, rank=worker) for worker in range(2)]
    engine.set_job(pb.SetJobRequest(job_id=1, name="ads/ads", staleness=3, members=members))
    first, second = (
        _client.Client(
            shards=[("127.0.0.1", engine.port)],
            slot_owner=np.zeros(SLOTS, np.uint16),
            cluster_id=1,
            route_epoch=0,
            job_id=1,
            worker_id=worker,
            worker_epoch=1,
        )
        for worker in range(2)
    )
    assert exported(engine) == {}
    keys, grads = np.arange(4), np.ones((4, 2), np.float32)
    for step in range(3):  # the second worker stays at step 0
        first.pull(TABLE.id, keys, dim=2, step=step)
        first.push(TABLE.id, keys, grads, dim=2, lr=1.0, sequence=step + 1, step=step)
    second.pull(TABLE.id, keys, dim=2, step=0)
    second.pull(TABLE.id, keys, dim=2)  # without a clock: not counted
    found = exported(engine)
    assert (found["count"], found["sum"]) == (4, 0 + 1 + 2 + 0)
    assert [found[bound] for bound in ("0", "1", "2", "3", "+Inf")] == [2, 3, 4, 4, 4]
