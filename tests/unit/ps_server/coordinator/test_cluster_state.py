"""The coordinator's state on disk: complete, atomic, locked, and honest about damage."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sparserow.proto import control_pb2 as pb
from sparserow.proto.errors import DataLoss, FailedPrecondition, InvalidArgument
from sparserow.proto.optim import Adam
from sparserow.proto.schema import TableSchema
from sparserow.ps_server.coordinator.state.cluster import Cluster, ClusterOptions
from sparserow.ps_server.coordinator.state.damage import Damage
from sparserow.ps_server.coordinator.state.faults import Process
from sparserow.ps_server.coordinator.state.lost_commits import CommitOwner
from sparserow.ps_server.coordinator.state.membership import JobTerms
from sparserow.ps_server.coordinator.state.roster import Roster, Span
from sparserow.ps_server.coordinator.state.shards import ShardPhase
from sparserow.ps_server.coordinator.storage.state_file import StateFile

OPTIONS = ClusterOptions(shards=3, slot_count=64)


def filled() -> Cluster:
    cluster = Cluster.create(OPTIONS)
    cluster.registry.admit(TableSchema("ads", "user", 8, Adam(), dtype="float16", seed=2**64 - 1))
    cluster.shards.register(1, instance=99, control=("127.0.0.1", 1), pid=5, tables=0, now=0.0)
    terms = JobTerms(1, None, "sum")
    ticket = cluster.jobs.register("ads", "ctr", 0, terms)
    cluster.jobs.admit(ticket, 0.0)
    cluster.jobs.heartbeat(ticket, 12, 0.0)
    roster = cluster.rosters[ticket.job_id] = Roster("ads/ctr", None, 1)
    roster.decide(7, [], [{}], [ticket])
    roster.spans[99, 1] = Span(99, 1, 1, 0, until_step=4, final_sequence=5)
    cluster.operations = 7
    cluster.faults.came("ads/ctr", (ticket.job_id, ticket.worker_id), Process(0, 1, "host", 5), 60.0)
    cluster.faults.report("ads/ctr", (ticket.job_id, 9), Process(1, 1, "host", 6), 60.0, "bad sample", "", False)
    cluster.rows_checkpoint = ("/ckpt/rows", "save-000003")
    cluster.shards.shards[1].restoring = True
    cluster.shards.shards[1].restores = 2
    cluster.shards.shards[2].instance = 77  # left in order
    cluster.shards.shards[2].phase = ShardPhase.LOST
    cluster.row_saves["/ckpt/rows"] = {ticket.job_id: 30.0}
    cluster.row_configs["/ckpt/rows"] = "{}"
    cluster.jobs.register("ads", "waiting", 0, JobTerms(2, 0, "mean"))
    cluster.lost.add(CommitOwner(1, 7, 0, 1, is_steps=True), 10, 19)
    cluster.damage = Damage("/ckpt/save-000003", {7, 9}, request=pb.RestoreRequest(url="/ckpt", name="save-000003"))
    return cluster


def test_a_restart_keeps_ids_route_lineage_tables_and_members() -> None:
    before = filled()
    after = Cluster.from_document(json.loads(json.dumps(before.to_document())), OPTIONS, now=50.0)
    assert after.cluster_id == before.cluster_id
    assert np.array_equal(after.slots.owners, before.slots.owners)
    assert after.registry.tables() == before.registry.tables()
    assert after.registry.namespaces() == before.registry.namespaces()
    assert [(s.instance, s.lineage) for s in after.shards.shards] == [(0, 0), (99, 1), (77, 0)]
    assert [s.phase for s in after.shards.shards] == [ShardPhase.MISSING, ShardPhase.STARTING, ShardPhase.LOST]
    assert after.shards.shards[1].expires_at == 50.0 + OPTIONS.shard_lease_sec
    assert (after.shards.shards[1].control, after.shards.shards[1].restores) == (("127.0.0.1", 1), 2)
    assert after.row_saves == before.row_saves
    assert after.row_configs == before.row_configs
    assert after.jobs.identities == before.jobs.identities
    assert after.jobs.next_worker_id == before.jobs.next_worker_id
    job = next(job for job in after.jobs.jobs.values() if job.name == "ctr")
    assert job.members[0].expires_at == 50.0 + OPTIONS.worker_lease_sec
    assert job.members[0].step == 12
    assert job.terms == JobTerms(1, None, "sum")
    assert {job.name for job in after.jobs.jobs.values()} == {"ctr"}, "candidates come again; a job of none is over"
    assert after.operations == 7
    assert after.rows_checkpoint == ("/ckpt/rows", "save-000003")
    assert [shard.restoring for shard in after.shards.shards] == [False, True, False]
    assert after.rosters == before.rosters
    assert after.faults.listed() == before.faults.listed()
    assert after.faults.processes == before.faults.processes
    assert after.damage == before.damage


def test_the_quorum_of_a_job_is_kept_and_the_version_before_has_none() -> None:
    cluster = Cluster.create(OPTIONS)
    ticket = cluster.jobs.register("ads", "ctr", 0, JobTerms(1, 0, "mean", quorum=1))
    cluster.jobs.admit(ticket, 0.0)
    cluster.rosters[ticket.job_id] = Roster("ads/ctr", 0, 1, quorum=1)
    document = json.loads(json.dumps(cluster.to_document()))
    after = Cluster.from_document(document, OPTIONS, now=50.0)
    assert after.jobs.jobs[ticket.job_id].terms.quorum == after.rosters[ticket.job_id].quorum == 1
    text = json.dumps(document).replace('"mean", 1]', '"mean"]').replace('"quorum": 1, ', "")
    assert text != json.dumps(document)
    before = Cluster.from_document(json.loads(text), OPTIONS, now=50.0)
    assert before.jobs.jobs[ticket.job_id].terms.quorum is before.rosters[ticket.job_id].quorum is None


def test_a_shard_that_is_held_is_not_given_to_another_process_after_a_restart() -> None:
    after = Cluster.from_document(filled().to_document(), OPTIONS, now=50.0)
    place = {"control": ("127.0.0.1", 2), "pid": 6, "tables": 1}
    with pytest.raises(FailedPrecondition, match=r"shard 1 is held by process 5; .* wait 9\.0 s"):
        after.shards.register(1, instance=100, now=51.0, **place)
    assert after.shards.register(1, instance=99, now=51.0, **place).lineage == 1
    assert after.shards.register(2, instance=100, now=51.0, **place).restoring


def test_clusters_have_ids_of_their_own() -> None:
    ids = {Cluster.create(OPTIONS).cluster_id for _ in range(16)}
    assert len(ids) == 16
    assert all(0 < cluster_id < 2**64 for cluster_id in ids)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ClusterOptions(shards=2, slot_count=64), "shards 3; the command says 2"),
        (ClusterOptions(shards=3, slot_count=128), "slot count 64; the command says 128"),
    ],
)
def test_another_cluster_is_refused(options: ClusterOptions, words: str) -> None:
    with pytest.raises(FailedPrecondition, match=words):
        Cluster.from_document(filled().to_document(), options, now=0.0)


@pytest.mark.parametrize("key", sorted(filled().to_document()))
def test_a_document_without_a_part_is_damaged(key: str) -> None:
    document = filled().to_document()
    del document[key]
    with pytest.raises(DataLoss, match="damaged"):
        Cluster.from_document(document, OPTIONS, now=0.0)


def test_another_format_is_refused() -> None:
    for other in (5, 7):
        with pytest.raises(FailedPrecondition, match=f"format {other}; this program reads format 6"):
            Cluster.from_document({**filled().to_document(), "format": other}, OPTIONS, now=0.0)


def test_the_state_of_two_hundred_jobs_that_have_ended_is_small() -> None:
    cluster = Cluster.create(OPTIONS)
    terms = JobTerms(1_000, None, "sum")
    for number in range(200):
        tickets = [
            cluster.jobs.register("ads", f"nightly-{number:03d}", rank, terms, bytes(16)) for rank in range(1_000)
        ]
        for ticket in tickets:
            cluster.jobs.leave_in_order(ticket)
        cluster.jobs.forget_ended(cluster.rosters, now=0.0)
    assert len(json.dumps(cluster.to_document())) < 1_000_000  # a state in etcd has 1.4 MB at most
    assert list(cluster.jobs.names.values())[-1] == "ads/nightly-199"


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "state.json")
    assert file.load() is None
    file.save({"a": 1})
    file.save({"a": 2})
    assert file.load() == {"a": 2}
    assert {path.name for path in tmp_path.iterdir()} == {"state.json", "state.json.lock"}
    with pytest.raises(TypeError):
        file.save({"a": object()})
    assert file.load() == {"a": 2}
    file.close()


def test_two_coordinators_cannot_share_a_file(tmp_path: Path) -> None:
    first = StateFile(tmp_path / "state.json")
    with pytest.raises(FailedPrecondition, match="another coordinator uses the file"):
        StateFile(tmp_path / "state.json")
    first.close()
    StateFile(tmp_path / "state.json").close()


def test_a_broken_file_and_a_missing_folder_are_named(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_text("{")
    file = StateFile(path)
    with pytest.raises(DataLoss, match=str(path)):
        file.load()
    file.close()
    with pytest.raises(InvalidArgument, match="No such file or directory"):
        StateFile(tmp_path / "missing" / "state.json")
