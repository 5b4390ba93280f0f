"""Finds the tables of a namespace, and their rows, at the start of each generation of a job.

The first rank that registers triggers the lookup, while no rank of the generation can have made a table.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from ....proto import control_pb2 as pb
from ....proto.errors import FailedPrecondition, SparserowError
from ..state.cluster import Cluster
from ..state.membership import Job, Ticket
from .shard_calls import ShardCalls

_MOST_LISTED = 1000
_MOST_NAMED = 5


@dataclass(frozen=True)
class FoundTables:
    """The tables that were found.

    Attributes:
        listed: the tables ordered by name, at most 1,000.
        count: the number of all tables.
    """

    listed: tuple[pb.FoundTable, ...]
    count: int


class FoundTablesOfJobs:
    """The tables that each job of a cluster found.

    Args:
        cluster, shard_calls: the cluster whose tables are looked up.
    """

    def __init__(self, cluster: Cluster, shard_calls: ShardCalls) -> None:
        self._cluster = cluster
        self._shard_calls = shard_calls
        self._found: dict[int, tuple[int, asyncio.Task[FoundTables]]] = {}  # by job id: its generation, and the lookup

    async def of(self, ticket: Ticket, *, refuses: bool) -> FoundTables:
        """Returns the tables that the generation of a candidate found; none when the candidate joins a running job.

        Args:
            ticket: the registration of the candidate.
            refuses: whether the candidate requires a namespace without tables.

        Raises:
            FailedPrecondition: ``refuses`` is set, and there were tables; the text names some.
            Fenced: the rank has registered again.
        """
        job = self._cluster.jobs.check(ticket)
        if job.members[ticket.rank].joins:
            return FoundTables((), 0)
        known = self._found.get(job.job_id)
        if known is None or known[0] != job.generation:
            self._forget_ended()
            known = job.generation, asyncio.create_task(self._look(job.namespace))
            self._found[job.job_id] = known
        found = await asyncio.shield(known[1])
        if refuses and found.count:
            raise FailedPrecondition(_refusal(job, found))
        return found

    async def _look(self, namespace: str) -> FoundTables:
        tables = self._cluster.registry.tables(namespace)
        if not tables:
            return FoundTables((), 0)
        rows: Counter[int] = Counter()
        is_known = True
        ids = [schema.id for schema in tables[:_MOST_LISTED]]
        try:
            for usage in await self._shard_calls.usage_of_tables(ids):
                rows[usage.table_id] += usage.rows
        except SparserowError:
            is_known = False
        listed = tuple(
            pb.FoundTable(name=schema.name, rows=rows[schema.id] if is_known else None)
            for schema in tables[:_MOST_LISTED]
        )
        return FoundTables(listed, len(tables))

    def _forget_ended(self) -> None:
        for job_id in [job_id for job_id in self._found if job_id not in self._cluster.jobs.jobs]:
            del self._found[job_id]


def _refusal(job: Job, found: FoundTables) -> str:
    named = ", ".join(
        f"{table.name} ({table.rows} rows)" if table.HasField("rows") else table.name
        for table in found.listed[:_MOST_NAMED]
    )
    more = f" and {found.count - _MOST_NAMED} more" if found.count > _MOST_NAMED else ""
    return (
        f"namespace {job.namespace!r}: namespace_policy is 'new', and it has {found.count} tables: {named}{more}; "
        "drop them, use another namespace, or namespace_policy='continue'"
    )
