"""Restores and saves of a coordinator whose disk is full, or whose shards refuse, at each stage; shards are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from checkpoint_rows import checkpoint_without_rows
from sparserow.proto import control_pb2 as pb
from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.errors import DataLoss, FailedPrecondition, ResourceExhausted, SparserowError, Unavailable
from sparserow.proto.optim import SGD
from sparserow.proto.schema import TableSchema
from sparserow.ps_server.coordinator.procedures.checkpoint_restore import CheckpointRestores
from sparserow.ps_server.coordinator.procedures.checkpoint_save import CheckpointSaves
from sparserow.ps_server.coordinator.procedures.membership_change import JobOperations
from sparserow.ps_server.coordinator.procedures.turn_lock import TurnLock
from sparserow.ps_server.coordinator.state.cluster import Cluster, ClusterOptions
from sparserow.ps_server.coordinator.state.membership import JobTerms, Ticket
from sparserow.ps_server.coordinator.state.shards import Shard

DEADLINE_SEC = 60.0


class FakeFleet:
    """Notes what a shard is told, and fails at one stage."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.stages: list[str] = []
        self.fails_at = ""
        self.refused: list[int] = []
        self.rows = 5

    def at(self, stage: str) -> None:
        self.stages.append(stage)
        if stage == self.fails_at:
            raise DataLoss(f"{stage} failed")

    async def usage_of_tables(self, table_ids: Collection[int]) -> list[pb.TableUsage]:
        ids = {schema.id for schema in self.cluster.registry.tables()}.intersection(table_ids)
        return [pb.TableUsage(table_id=table_id, rows=self.rows) for table_id in ids]

    async def send_refusal(self) -> None:
        self.refused = list(self.cluster.refusal().table_ids)
        self.at("refuse" if self.refused else "open")

    async def stream(self, _shard: Shard, _method: str, request: pb.LoadRequest) -> AsyncIterator[pb.LoadReply]:
        self.at("verify" if request.verify_only else "load")
        yield pb.LoadReply(rows=7)

    async def freeze_job(self, *_: Any) -> list[dict[Any, Any]]:
        self.at("freeze")
        return [{}]

    async def send_job(self, *_: Any, **__: Any) -> None:
        self.stages.append("tell job")

    async def cut(self, *_: Any) -> list[pb.CutReply]:
        self.cluster.loads += 1  # a restore begins
        return [pb.CutReply(windows_json="[]")]

    async def end_cut(self, *_: Any) -> None:
        self.at("end cut")


class Disk:
    """Where the cluster's state goes; full at the n-th write from now on."""

    def __init__(self) -> None:
        self.left = 1 << 30

    def save(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise ResourceExhausted("the disk is full")


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """One shard that serves a table, of which there is a checkpoint."""
    made = Cluster.create(ClusterOptions(shards=1, slot_count=64))
    schema, _ = made.registry.admit(TableSchema("ads", "user", 8, SGD()))
    folder = Folder(str(tmp_path))
    manifest = checkpoint_without_rows(folder, made.cluster_id, schema, 64)
    made.shards.register(0, instance=1, control=("127.0.0.1", 1), pid=1, tables=0, now=0.0)
    made.shards.heartbeat(0, instance=1, data=("127.0.0.1", 2), draining=False, now=0.0)
    made.shards.mark_serving(0, 1)
    made.has_rows_in("/before", manifest)
    return made


def joined(cluster: Cluster, workers: int) -> list[Ticket]:
    """A job of the namespace whose workers have joined."""
    terms = JobTerms(world_size=workers, staleness=None, grad_scale="mean")
    tickets = [cluster.jobs.register("ads", "ctr", rank, terms) for rank in range(workers)]
    for ticket in tickets:
        cluster.jobs.admit(ticket, 0.0)
    return tickets


def wait_for_none(job_ids: Collection[int]) -> None:
    """Ends no lease: these jobs have no late workers."""


def restored(
    cluster: Cluster,
    shard_calls: FakeFleet,
    disk: Disk,
    url: Path,
    namespace: str = "",
    ticket: Ticket | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> pb.RestoreReply:
    async def scene() -> pb.RestoreReply:
        operations = JobOperations(cluster, shard_calls, disk.save)  # type: ignore[arg-type]
        restores = CheckpointRestores(cluster, shard_calls, operations, disk.save, TurnLock(), wait_for_none)  # type: ignore[arg-type]
        try:
            request = pb.RestoreRequest(url=str(url), namespace=namespace)
            if ticket is not None:
                job_id = next(iter(cluster.jobs.jobs))
                fails_at, shard_calls.fails_at = shard_calls.fails_at, ""
                await operations.settle(job_id)
                shard_calls.fails_at = fails_at
                shard_calls.stages.clear()
                request.caller.job_id, request.caller.worker_id = job_id, ticket.worker_id
                request.caller.epoch, request.caller.attempt = ticket.epoch, 1
            restoring = asyncio.ensure_future(restores.restore(request))
            await asyncio.sleep(0.05)
            meanwhile()
            return await restoring
        finally:
            await restores.close()

    return asyncio.run(asyncio.wait_for(scene(), DEADLINE_SEC))


def test_rows_are_verified_and_refused_before_they_go(cluster: Cluster, tmp_path: Path) -> None:
    shard_calls = FakeFleet(cluster)
    assert restored(cluster, shard_calls, Disk(), tmp_path).rows == 7
    assert shard_calls.stages == ["verify", "refuse", "load", "open"]
    assert (cluster.damage, cluster.rows_checkpoint) == (None, (str(tmp_path), "save-000001"))
    shard_calls.rows = 0
    shard_calls.stages.clear()
    restored(cluster, shard_calls, Disk(), tmp_path)
    assert shard_calls.stages == ["refuse", "load", "open"], "an empty cluster has nothing to lose"


@pytest.mark.parametrize("stage", ["verify", "refuse", "disk"])
def test_what_fails_before_a_table_is_emptied_changes_nothing(cluster: Cluster, tmp_path: Path, stage: str) -> None:
    shard_calls, disk = FakeFleet(cluster), Disk()
    shard_calls.fails_at = stage
    if stage == "disk":
        disk.left = 0
    with pytest.raises(SparserowError, match=f"{stage} (failed|is full)"):
        restored(cluster, shard_calls, disk, tmp_path)
    assert "load" not in shard_calls.stages
    assert (cluster.damage, cluster.rows_checkpoint, shard_calls.refused) == (None, ("/before", "save-000001"), [])


def test_a_job_whose_workers_have_all_left_restores_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """A worker asks and leaves, while the restore waits for one that has died; then that one's lease ends."""
    tickets = joined(cluster, 2)
    shard_calls = FakeFleet(cluster)

    def leave() -> None:
        for each in tickets:
            cluster.jobs.leave_in_order(each)

    with pytest.raises(Unavailable, match="all workers of the job have left before it began; nothing was changed"):
        restored(cluster, shard_calls, Disk(), tmp_path, "ads", tickets[0], leave)
    assert shard_calls.stages == []
    assert (cluster.damage, cluster.rows_checkpoint) == (None, ("/before", "save-000001"))


@pytest.mark.parametrize("is_over", [False, True])
def test_a_job_that_cannot_be_frozen_leaves_the_rows_as_they_were(
    cluster: Cluster, tmp_path: Path, is_over: bool
) -> None:
    (ticket,) = joined(cluster, 1)
    shard_calls = FakeFleet(cluster)
    shard_calls.fails_at = "" if is_over else "freeze"
    tell = shard_calls.send_refusal

    async def tell_and_leave() -> None:
        await tell()
        if is_over and shard_calls.refused:
            cluster.jobs.leave_in_order(ticket)

    shard_calls.send_refusal = tell_and_leave  # type: ignore[method-assign]
    with pytest.raises(SparserowError, match="has ended before its restore began" if is_over else "freeze failed"):
        restored(cluster, shard_calls, Disk(), tmp_path, "ads", ticket)
    assert "load" not in shard_calls.stages
    assert (cluster.damage, cluster.rows_checkpoint, shard_calls.refused) == (None, ("/before", "save-000001"), [])
    again = Cluster.from_document(cluster.to_document(), ClusterOptions(shards=1, slot_count=64), now=0.0)
    assert again.damage is None


@pytest.mark.parametrize("stage", ["load", "disk"])
def test_what_fails_afterwards_is_damage(cluster: Cluster, tmp_path: Path, stage: str) -> None:
    shard_calls, disk = FakeFleet(cluster), Disk()
    shard_calls.fails_at = stage
    if stage == "disk":
        disk.left = 1
    with pytest.raises(SparserowError, match=f"{stage} (failed|is full)"):
        restored(cluster, shard_calls, disk, tmp_path)
    assert cluster.damage is not None
    assert stage in cluster.damage.failure
    assert (
        shard_calls.refused == sorted(cluster.damage.table_ids) == [schema.id for schema in cluster.registry.tables()]
    )
    again = Cluster.from_document(cluster.to_document(), ClusterOptions(shards=1, slot_count=64), now=0.0)
    assert again.damage == cluster.damage
    with pytest.raises(
        FailedPrecondition, match=r"the cluster is damaged, because the restore of .*save-000001 failed"
    ):
        again.check_whole()
    shard_calls.fails_at = ""
    restored(cluster, shard_calls, Disk(), tmp_path)
    assert (cluster.damage, shard_calls.refused) == (None, [])


def test_a_cut_that_falls_into_a_restore_is_no_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    async def scene() -> None:
        shard_calls = FakeFleet(cluster)
        operations = JobOperations(cluster, shard_calls, lambda: None)  # type: ignore[arg-type]
        saves = CheckpointSaves(cluster, shard_calls, operations, lambda: None, wait_for_none)  # type: ignore[arg-type]
        name = (await saves.begin(pb.BeginSaveRequest(url=str(tmp_path)))).name
        with pytest.raises(Unavailable, match="rows were restored while the cut was taken; save again"):
            await saves.enter(pb.EnterSaveRequest(url=str(tmp_path), name=name, keep=1))
        await saves.close()

    asyncio.run(asyncio.wait_for(scene(), DEADLINE_SEC))
    assert files.list_names(Folder(str(tmp_path))) == ["save-000001"]


def test_a_failed_restore_of_one_namespace_damages_no_other(cluster: Cluster, tmp_path: Path) -> None:
    other, _ = cluster.registry.admit(TableSchema("own", "user", 8, SGD()))
    ads = cluster.registry.get("ads", "user")
    assert ads is not None
    shard_calls = FakeFleet(cluster)
    shard_calls.fails_at = "load"
    lineage = cluster.shards.lineage
    with pytest.raises(DataLoss):
        restored(cluster, shard_calls, Disk(), tmp_path, "ads")
    assert cluster.damage is not None
    assert shard_calls.refused == [ads.id]
    assert (cluster.is_lost, cluster.shards.lineage) == (False, lineage)
    assert cluster.rows_checkpoint == ("/before", "save-000001"), "a shard gets the rows of other namespaces from it"
    assert not cluster.awaits_restore
    cluster.rows_checkpoint = None
    assert cluster.awaits_restore, "nothing else has the rows of own/user"
    cluster.rows_checkpoint = ("/before", "save-000001")
    shard_calls.fails_at = ""
    restored(cluster, shard_calls, Disk(), tmp_path, "ads")
    assert (cluster.damage, cluster.shards.lineage) == (None, lineage)
    assert cluster.row_sources.keys() == {ads.id}
    again = Cluster.from_document(cluster.to_document(), ClusterOptions(shards=1, slot_count=64), now=0.0)
    assert again.row_sources == cluster.row_sources
    restored(cluster, shard_calls, Disk(), tmp_path)
    assert (cluster.shards.lineage, cluster.row_sources.keys()) == (lineage, {ads.id}), (
        "it lacks a table of the cluster"
    )
    cluster.registry.remove(other.id)
    restored(cluster, shard_calls, Disk(), tmp_path)
    assert (cluster.shards.lineage, cluster.row_sources) == (lineage + 1, {})


def caller_of(cluster: Cluster, ticket: Ticket, attempt: int) -> pb.CheckpointCaller:
    return pb.CheckpointCaller(job_id=ticket.job_id, worker_id=ticket.worker_id, epoch=ticket.epoch, attempt=attempt)


def saves_of(cluster: Cluster, shard_calls: FakeFleet, disk: Disk) -> CheckpointSaves:
    operations = JobOperations(cluster, shard_calls, disk.save)  # type: ignore[arg-type]
    return CheckpointSaves(cluster, shard_calls, operations, disk.save, wait_for_none)  # type: ignore[arg-type]


def test_a_worker_that_comes_late_to_a_failed_save_gets_its_end(cluster: Cluster, tmp_path: Path) -> None:
    """One rank fails before another has called: that one begins no other save, which would wait in vain."""
    first, second = joined(cluster, 2)
    job = cluster.jobs.jobs[first.job_id]

    async def scene() -> None:
        saves = saves_of(cluster, FakeFleet(cluster), Disk())

        async def begin(ticket: Ticket, attempt: int, url: Path = tmp_path) -> pb.BeginSaveReply:
            return await saves.begin(pb.BeginSaveRequest(url=str(url), caller=caller_of(cluster, ticket, attempt)))

        for attempt in (1, 2):
            begun = await begin(first, attempt)
            assert begun.name
            assert (await begin(first, attempt)).name == begun.name, "a call that is repeated joins its own save"
            request = pb.EnterSaveRequest(
                url=str(tmp_path),
                name=begun.name,
                caller=caller_of(cluster, first, attempt),
                problem="the disk is full",
            )
            with pytest.raises(Unavailable, match="the disk is full"):
                await saves.enter(request)
            late = await begin(second, attempt)
            assert (late.name, late.attempts) == ("", attempt)
            assert "the disk is full" in late.problem
            assert late.problem_code == Unavailable.number
        assert job.saves_begun == 2
        one, other = await asyncio.gather(begin(second, 3), begin(first, 3))
        assert one.name == other.name
        with pytest.raises(SparserowError, match=r"another worker of the job saves to .*, this one to "):
            await begin(second, 3, tmp_path / "elsewhere")
        behind = await begin(first, 1)
        assert (behind.name, behind.attempts) == ("", 3)
        with pytest.raises(SparserowError, match=r"caller.attempt: 0 is not allowed; allowed: >= 1 of a worker"):
            await begin(first, 0)
        await saves.close()

    (tmp_path / "elsewhere").mkdir()
    asyncio.run(asyncio.wait_for(scene(), DEADLINE_SEC))


def test_a_worker_that_comes_late_to_a_failed_restore_gets_its_end(cluster: Cluster, tmp_path: Path) -> None:
    first, second = joined(cluster, 2)
    terms = JobTerms(world_size=1, staleness=None, grad_scale="mean")
    other = cluster.jobs.register("ads", "another", 0, terms)
    cluster.jobs.admit(other, 0.0)

    async def scene() -> None:
        shard_calls, disk = FakeFleet(cluster), Disk()
        operations = JobOperations(cluster, shard_calls, disk.save)  # type: ignore[arg-type]
        restores = CheckpointRestores(cluster, shard_calls, operations, disk.save, TurnLock(), wait_for_none)  # type: ignore[arg-type]

        async def restore(ticket: Ticket, attempt: int) -> pb.RestoreReply:
            caller = caller_of(cluster, ticket, attempt)
            return await restores.restore(pb.RestoreRequest(url=str(tmp_path), namespace="ads", caller=caller))

        for attempt in (1, 2):
            for ticket in (first, second):
                with pytest.raises(FailedPrecondition, match="jobs ads/another are running on namespace ads"):
                    await restore(ticket, attempt)
        with pytest.raises(Unavailable, match="restore 1 of the job has ended without this worker"):
            await restore(second, 1)
        cluster.jobs.leave_in_order(other)
        await operations.settle(first.job_id)
        replies = await asyncio.gather(restore(first, 3), restore(second, 3))
        assert [reply.rows for reply in replies] == [7, 7]
        await restores.close()

    asyncio.run(asyncio.wait_for(scene(), DEADLINE_SEC))
