"""Registers workers: waits for all ranks of a job, and lets the shards know its members."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from ....proto import control_pb2 as pb
from ....proto.errors import ResourceExhausted, SparserowError, not_allowed
from ....proto.job_terms import GRAD_SCALES
from ....proto.names import check_name, id_of_name
from ....proto.security.security import process_security
from ..state.cluster import Cluster
from ..state.faults import Process
from ..state.membership import JobTerms, Ticket
from ..state.registration_rates import MOST_WAIT_SEC, RegistrationRates
from .found_tables import FoundTablesOfJobs
from .membership_change import JobOperations
from .shard_calls import ShardCalls, check_knows_quorum

log = logging.getLogger(__name__)

# The answer that ranks are missing must reach a worker before its own deadline, also on busy CPUs.
_ANSWER_MARGIN_SEC = 0.3  # at least
_ANSWER_MARGIN = 0.1  # as a share of the worker's deadline
_DEFAULT_WAIT_SEC = 60.0
_PROOF_BYTES = 16


class WorkerRegistrations:
    """The registrations of workers with the jobs of a cluster. It belongs to one event loop.

    Args:
        cluster: the cluster of the jobs.
        shard_calls: the connections to the shards.
        operations: changes the members of jobs on the shards.
        save: saves the state of the cluster.
        clock: returns monotonic time in seconds.
        begin: starts a task that no request waits for.
        wait_for: ends the leases of late workers of jobs, for which something waits.
    """

    def __init__(
        self,
        cluster: Cluster,
        shard_calls: ShardCalls,
        operations: JobOperations,
        *,
        save: Callable[[], None],
        clock: Callable[[], float],
        begin: Callable[[Coroutine[Any, Any, None]], object],
        wait_for: Callable[[Collection[int]], None],
    ) -> None:
        self._cluster, self._operations = cluster, operations
        self._save, self._clock, self._begin, self._wait_for = save, clock, begin, wait_for
        self._changed = asyncio.Event()  # set, and replaced, when members of a job change
        self._found_tables = FoundTablesOfJobs(cluster, shard_calls)
        self._rates = RegistrationRates()

    async def register(self, request: pb.RegisterWorkerRequest, left_sec: float | None) -> pb.RegisterWorkerReply:
        """Registers a worker; returns when every rank has joined and every shard knows the members.

        Args:
            request: the request of the worker.
            left_sec: the seconds until the caller's deadline; None: it has none.

        Raises:
            InvalidArgument: a value of the request is not allowed.
            FailedPrecondition: another worker of the job gave other terms, or there are tables that must not be.
            ResourceExhausted: the namespace has as many jobs, or registers as often, as it may.
            DeadlineExceeded: not all ranks have joined in time.
            Fenced: this rank has registered again.
        """
        self._cluster.check_ready()
        waited_sec = await self._await_turn(request, left_sec)
        left_sec = None if left_sec is None else left_sec - waited_sec
        terms = _terms_of(request)
        if terms.quorum is not None:
            check_knows_quorum(self._cluster.shards.shards)
        namespace_id = self._cluster.registry.namespace_id(request.namespace)
        proof = secrets.token_bytes(_PROOF_BYTES)
        ticket = self._cluster.jobs.register(request.namespace, request.job, request.rank, terms, proof)
        process = Process(ticket.rank, ticket.epoch, request.host, request.pid)
        key = ticket.job_id, ticket.worker_id
        self._cluster.faults.came(f"{request.namespace}/{request.job}", key, process, time.time())
        try:
            self._save()
            self.notify()
            found = await self._found_tables.of(ticket, refuses=request.needs_new_namespace)
            await self._operations.settle(ticket.job_id)
            await self._gather(ticket, _wait_sec(left_sec))
            await self._operations.settle(ticket.job_id)
            self._cluster.jobs.check(ticket)
            span = self._cluster.rosters[ticket.job_id].spans[ticket.worker_id, ticket.epoch]
            self._cluster.note_joined(ticket.job_id, span.key)
            first_step = self._cluster.jobs.admit(ticket, self._clock(), reached=span.first_step - 1)
            self._save()
        except BaseException:  # also when the caller has gone
            self._withdraw(ticket)
            raise
        job = self._cluster.jobs.check(ticket)
        log.info("job %s/%s: rank %d is worker %d", request.namespace, request.job, request.rank, ticket.worker_id)
        return pb.RegisterWorkerReply(
            namespace_id=namespace_id,
            job_id=ticket.job_id,
            worker_id=ticket.worker_id,
            epoch=ticket.epoch,
            lease_sec=self._cluster.jobs.lease_sec,
            first_step=first_step,
            proof=proof,
            found=found.listed,
            found_count=found.count,
            quorum=request.quorum,
            saves_begun=job.saves_begun,
            restores_begun=job.restores_begun,
            generation=job.generation,
        )

    async def _await_turn(self, request: pb.RegisterWorkerRequest, left_sec: float | None) -> float:
        """Waits as long as the namespace registers too fast, and returns the seconds; nothing is noted before.

        Raises:
            ResourceExhausted: it registers much too fast, or the job would be one too many.
        """
        quotas, namespace = process_security().quotas, request.namespace
        check_name("namespace", namespace)  # of no other name is the rate noted
        most_sec = MOST_WAIT_SEC if left_sec is None else min(MOST_WAIT_SEC, left_sec)
        wait_sec = self._rates.delay(namespace, quotas.of(namespace).registrations_per_sec, self._clock(), most_sec)
        if wait_sec:
            await asyncio.sleep(wait_sec)
            self._cluster.check_ready()
        jobs, own = self._cluster.jobs, id_of_name(f"{namespace}/{request.job}")
        self._wait_for({own})
        if own not in jobs.jobs:
            try:
                quotas.check_jobs(namespace, 1 + len(jobs.in_namespace(namespace)))
            except ResourceExhausted:
                self._wait_for([job.job_id for job in jobs.in_namespace(namespace)])
                quotas.check_jobs(namespace, 1 + len(jobs.in_namespace(namespace)))
        return wait_sec

    async def _gather(self, ticket: Ticket, wait_sec: float) -> None:
        """Waits for the other ranks.

        Raises:
            DeadlineExceeded: not all ranks have joined within ``wait_sec``.
            Fenced: this rank has registered again.
        """
        jobs = self._cluster.jobs
        try:
            async with asyncio.timeout(wait_sec):
                while not jobs.check(ticket).gathered:
                    await self._changed.wait()
        except TimeoutError:
            raise jobs.waiting_error(jobs.check(ticket), ticket, wait_sec) from None

    def _withdraw(self, ticket: Ticket) -> None:
        """Removes a candidate from its job; the shards are informed in the background, because the caller may have
        gone.
        """
        self._cluster.faults.left((ticket.job_id, ticket.worker_id), ticket.epoch)
        if self._cluster.jobs.withdraw(ticket) is not None:
            self._begin(self.after_leaving(ticket.job_id))

    async def after_leaving(self, job_id: int) -> None:
        """Saves that workers have left a job, and informs the shards; an error is logged.

        Args:
            job_id: the id of the job.
        """
        try:
            self._save()
            self.notify()
            await self._operations.settle(job_id)
        except SparserowError as error:  # the shard is behind now, or the disk is full; both are reported elsewhere
            log.warning("job %d: %s", job_id, error)

    def notify(self) -> None:
        """Wakes the calls that wait for other ranks, since the members of a job have changed.

        It takes no lock, because a call that is cancelled twice while it waits for one may keep it: asyncio.Condition
        within asyncio.wait_for does so in Python 3.11, and nobody would register any more.
        """
        self._changed.set()
        self._changed = asyncio.Event()


def _terms_of(request: pb.RegisterWorkerRequest) -> JobTerms:
    if not 0 <= request.grad_scale < len(GRAD_SCALES):
        raise not_allowed("grad_scale", request.grad_scale, "MEAN (0), SUM (1)")
    return JobTerms(
        world_size=request.world_size,
        staleness=request.staleness if request.HasField("staleness") else None,
        grad_scale=GRAD_SCALES[request.grad_scale],
        quorum=request.quorum or None,
    )


def _wait_sec(left_sec: float | None) -> float:
    """Returns how long a worker waits for the other ranks, so that the answer reaches it before its deadline."""
    if left_sec is None:
        return _DEFAULT_WAIT_SEC
    return max(0.05, left_sec - max(_ANSWER_MARGIN_SEC, _ANSWER_MARGIN * left_sec))
