"""What the coordinator keeps does not grow with the jobs, workers and tables that have been."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from sparserow.proto.optim import SGD
from sparserow.proto.schema import TableSchema
from sparserow.ps_server.coordinator.procedures.membership_change import JobOperations
from sparserow.ps_server.coordinator.state import departed_workers, ended_jobs
from sparserow.ps_server.coordinator.state.cluster import Cluster, ClusterOptions
from sparserow.ps_server.coordinator.state.membership import JobTerms
from sparserow.ps_server.coordinator.state.registry import Registry
from sparserow.ps_server.coordinator.state.roster import CommitWindow, Roster, WorkerKey

JOBS = 2_000  # more than are remembered
SHARDS = 2


class Shards:
    """They answer at once; each has ten commits of every worker."""

    async def freeze_job(
        self, job_id: int, _: int, fence: Sequence[WorkerKey], lease_sec: float = 0.0
    ) -> list[dict[WorkerKey, CommitWindow]]:
        assert job_id
        assert lease_sec >= 0
        return [{key: CommitWindow(committed_step=9, steps_taken=10) for key in fence} for _ in range(SHARDS)]

    async def send_job(self, _: int, roster: Roster, *, all_or_none: bool = True) -> None:
        assert roster.operation
        assert all_or_none

    async def drop_job(self, _: int, operation: int) -> None:
        assert operation


def test_jobs_that_come_and_go_leave_a_bounded_state() -> None:
    cluster = Cluster.create(ClusterOptions(shards=SHARDS, slot_count=64))
    operations = JobOperations(cluster, Shards(), lambda: None)  # type: ignore[arg-type]

    async def run() -> None:
        for number in range(JOBS):
            ticket = cluster.jobs.register("ads", f"job{number}", 0, JobTerms(1, 2, "mean"))
            await operations.settle(ticket.job_id)
            cluster.note_joined(ticket.job_id, (ticket.worker_id, ticket.epoch))
            cluster.jobs.admit(ticket, float(number))
            cluster.leaving[ticket.job_id, ticket.worker_id, ticket.epoch] = (10, 10)
            cluster.jobs.leave_in_order(ticket)
            await operations.settle(ticket.job_id)
            cluster.jobs.forget_ended(cluster.rosters, float(number))

    asyncio.run(run())
    of_live_jobs = (cluster.jobs.jobs, cluster.rosters, cluster.leaving, cluster.restores_before)
    assert [len(kept) for kept in of_live_jobs] == [0] * len(of_live_jobs)
    assert (len(operations._settled), len(operations._locks)) == (0, 0)
    assert len(cluster.jobs.names) <= ended_jobs.MOST_JOBS
    assert len(cluster.jobs.identities) <= ended_jobs.MOST_JOBS
    assert len(cluster.departed) * SHARDS <= departed_workers.MOST_COUNTS
    assert len(json.dumps(cluster.to_document())) < 1 << 20


def test_tables_that_come_and_go_leave_nothing() -> None:
    registry = Registry()
    for number in range(JOBS):
        schema, is_new = registry.admit(TableSchema(namespace=f"n{number}", name="t", dim=4, optimizer=SGD(lr=0.1)))
        assert is_new
        registry.saved_forms()
        registry.remove(schema.id)
        registry.remove_namespace(f"n{number}")
    assert all(not kept for kept in vars(registry).values()), vars(registry)
