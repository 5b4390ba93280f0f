"""Jobs and their workers: ranks, epochs and leases. The module does no I/O and is not thread-safe.

A job gathers until ``world_size`` ranks have registered; then all of them are admitted together. A member leaves by
itself or when its lease ends: one that was not heard for a lease is *late*, and its lease ends as soon as something
waits for it, or two leases later. A job without members is over. The commits of a member that has left still count
(roster.py).

A rank that registers again gets a new epoch, and its former registration is fenced. In a synchronous job that also
fences all other members, because steps are reduced together. The workers then register again as the next *generation*,
whose clock starts at step 0. With bounded or no staleness a single rank comes back alone, or joins as an additional
one: the job grows to the world size that the rank gives.

Invariants:
 1. (job, rank) keeps its worker id while its job is remembered; its epoch only grows. A worker id is given once, and a
    generation is the number of one clock of one job. Neither is used again, also for a job that was forgotten.
 2. All members and candidates of a job agree on world size, staleness, gradient scale and quorum.
 3. ``revision`` changes whenever the state that shards must know of a job changes.

Times are seconds of a monotonic clock that the caller passes in.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from ....proto import control_pb2 as pb
from ....proto.errors import DeadlineExceeded, FailedPrecondition, Fenced, not_allowed
from ....proto.names import check_name, id_of_name
from .ended_jobs import EndedJobs
from .training_rate import TrainingRate

_LEASES = 3  # how many leases a member may be silent while nothing waits for it


@dataclass(frozen=True)
class JobTerms:
    """The terms that all workers of a job must agree on.

    Attributes:
        world_size: the number of ranks.
        staleness: the bound on staleness, in steps; None means asynchronous.
        grad_scale: "mean" or "sum".
        quorum: the number of members of a step, with staleness 0; None means all workers.
    """

    world_size: int
    staleness: int | None
    grad_scale: str
    quorum: int | None = None


@dataclass(frozen=True)
class Ticket:
    """One registration of one rank."""

    job_id: int
    rank: int
    worker_id: int
    epoch: int


@dataclass
class Member:
    """A registered rank. ``expires_at`` is infinite until the rank is admitted."""

    ticket: Ticket
    expires_at: float = float("inf")
    step: int = 0  # the step that it last reported
    admitted: bool = False
    joins: bool = False  # whether the job was running already when it registered
    busy: bool = False  # whether it said in its last heartbeat that it is at work on what it does alone
    waits: bool = False  # whether it said there that it waits for other workers of the job
    training: TrainingRate = field(default_factory=TrainingRate)  # as its heartbeats say


@dataclass
class Job:
    """A set of workers with one clock."""

    job_id: int
    namespace: str
    name: str
    terms: JobTerms
    generation: int = 1
    revision: int = 1
    gathered: bool = False  # whether all ranks have registered in this generation
    members: dict[int, Member] = field(default_factory=dict)  # by rank
    # The newest attempts that its workers have made together. They are not kept: a coordinator that knows none goes on
    # with what the workers count.
    saves_begun: int = 0
    restores_begun: int = 0

    @property
    def full_name(self) -> str:
        """The name ``namespace/name``."""
        return f"{self.namespace}/{self.name}"

    def missing_ranks(self) -> list[int]:
        """Returns the ranks that have not registered, in ascending order."""
        return [rank for rank in range(self.terms.world_size) if rank not in self.members]

    def has_busy_peer(self, ticket: Ticket, now: float) -> bool:
        """Returns whether another worker is at work on what it does alone.

        One that is gone is not, though it is a member past its lease until something waits for it.
        """
        others = [member for rank, member in self.members.items() if rank != ticket.rank]
        return any(member.busy and member.expires_at > now for member in others)


@dataclass
class Identity:
    """The numbers that (job, rank) keeps while it is not a member."""

    worker_id: int
    epoch: int
    proof_sha256: bytes  # of what the worker of this epoch shows with each call


class Membership:
    """All jobs of a cluster.

    Args:
        lease_sec: the seconds without a heartbeat after which a member leaves its job when something waits for it;
            when nothing does, it leaves after three times as long.
        memory_sec: the seconds after its end at which a job is forgotten.
    """

    def __init__(self, lease_sec: float, memory_sec: float = 3600.0) -> None:
        self.lease_sec = lease_sec
        self.jobs: dict[int, Job] = {}
        self.identities: dict[int, dict[int, Identity]] = {}  # by job id and rank
        self.names: dict[int, str] = {}  # job id -> full name
        self.next_worker_id = 1
        self.next_generation = 1
        self._ended = EndedJobs(memory_sec)

    def in_namespace(self, namespace: str) -> list[Job]:
        """Returns the jobs of a namespace; "": all jobs."""
        return [job for job in self.jobs.values() if namespace in ("", job.namespace)]

    def register(self, namespace: str, name: str, rank: int, terms: JobTerms, proof: bytes = b"") -> Ticket:
        """Adds a rank to its job as a candidate, and fences its former registration.

        Args:
            namespace, name: the namespace and name of the job.
            rank: the rank within the job.
            terms: the terms that the job's workers agree on.
            proof: random bytes that only this epoch of the worker will know; their SHA-256 is kept.

        Raises:
            InvalidArgument: the rank, the world size or the quorum is out of range.
            FailedPrecondition: the terms differ from those of the job's other workers; the text names the field and
                both values.
        """
        check_name("job", name)
        if not 0 <= rank < terms.world_size:
            raise not_allowed("rank", rank, f"[0, world_size ({terms.world_size}))")
        if terms.quorum is not None and (terms.staleness != 0 or terms.quorum > terms.world_size):
            raise not_allowed("quorum", terms.quorum, f"1 to {terms.world_size} workers, with staleness 0")
        job = self._job(namespace, name, rank, terms)
        if job.gathered and terms.staleness == 0:  # a rank registers again, so the steps of all workers are over
            self._begin_generation(job)
        ranks = self.identities.setdefault(job.job_id, {})
        identity = ranks.get(rank)
        if identity is None:
            identity = ranks[rank] = Identity(self.next_worker_id, 0, b"")
            self.next_worker_id += 1
        identity.epoch += 1
        identity.proof_sha256 = hashlib.sha256(proof).digest()
        ticket = Ticket(job.job_id, rank, identity.worker_id, identity.epoch)
        job.members[rank] = Member(ticket, joins=job.gathered)
        job.revision += 1
        job.gathered = job.gathered or len(job.members) == job.terms.world_size
        return ticket

    def check(self, ticket: Ticket) -> Job:
        """Returns the job of a ticket that is still valid.

        Raises:
            Fenced: the lease has ended, or the rank has registered again.
        """
        job = self.jobs.get(ticket.job_id)
        member = job.members.get(ticket.rank) if job is not None else None
        if job is None or member is None or member.ticket != ticket:
            name = self.names.get(ticket.job_id, str(ticket.job_id))
            raise Fenced(
                f"worker {ticket.worker_id} (epoch {ticket.epoch}) is not a member of job {name}: its lease has ended "
                f"(worker_lease: {self.lease_sec:g} s, three times as long where nothing waits for the worker), or a "
                "worker of the job has registered again; connect anew"
            )
        return job

    def find(self, job_id: int, worker_id: int, epoch: int) -> Ticket:
        """Returns the ticket of a worker that gives its numbers.

        Raises:
            Fenced: as for :meth:`check`.
        """
        job = self.jobs.get(job_id)
        for member in job.members.values() if job is not None else ():
            if member.ticket.worker_id == worker_id:
                ticket = Ticket(job_id, member.ticket.rank, worker_id, epoch)
                self.check(ticket)
                return ticket
        self.check(ticket := Ticket(job_id, -1, worker_id, epoch))
        return ticket

    def check_proof(self, ticket: Ticket, proof: bytes) -> None:
        """Checks that a call comes from the worker itself.

        Raises:
            FailedPrecondition: the worker of this epoch has another proof.
        """
        identity = self.identities.get(ticket.job_id, {}).get(ticket.rank)
        if identity is None or identity.epoch != ticket.epoch:
            return
        if not hmac.compare_digest(identity.proof_sha256, hashlib.sha256(proof).digest()):
            raise FailedPrecondition(
                f"proof: the bytes are not the proof of worker {ticket.worker_id} (epoch {ticket.epoch}) of job "
                f"{self.names.get(ticket.job_id, ticket.job_id)}; only the worker itself may call in its name"
            )

    def origin(self, job_id: int, worker_id: int, epoch: int) -> tuple[str, int]:
        """Returns the job's full name and the rank of a worker that is, or was, a member.

        Raises:
            Fenced: there was never such a worker, or its job is forgotten.
        """
        for rank, identity in self.identities.get(job_id, {}).items():
            if identity.worker_id == worker_id and 0 < epoch <= identity.epoch:
                return self.names[job_id], rank
        raise Fenced(
            f"worker {worker_id} (epoch {epoch}) is not known as a member of job {self.names.get(job_id, job_id)}"
        )

    def joins_running(self, ticket: Ticket) -> bool:
        """Whether a candidate joins a job that is running already and has no barrier.

        Raises:
            Fenced: as for :meth:`check`.
        """
        job = self.check(ticket)
        return job.members[ticket.rank].joins and job.terms.staleness != 0

    def admit(self, ticket: Ticket, now: float, *, reached: int = -1) -> int:
        """Starts the lease of a candidate whose job all shards know, and returns its first step.

        Args:
            ticket: the registration of the candidate.
            now: the present time, in seconds.
            reached: the highest step of which the shards have a commit, when the candidate joins a running job.

        Raises:
            Fenced: as for :meth:`check`.
        """
        job = self.check(ticket)
        member = job.members[ticket.rank]
        member.admitted, member.expires_at = True, now + self.lease_sec
        if self.joins_running(ticket):
            member.step = max(reached + 1, *(other.step for other in job.members.values()))
        return member.step

    def heartbeat(
        self,
        ticket: Ticket,
        step: int | None,
        now: float,
        *,
        busy: bool = False,
        waits: bool = False,
        figures: pb.TrainingFigures | None = None,
    ) -> None:
        """Renews a lease, and notes what a worker says of itself.

        Args:
            ticket: the worker.
            step: its step; None leaves it unchanged.
            now: the present time, in seconds.
            busy: whether it is at work on what it does alone.
            waits: whether it waits for other workers of the job.
            figures: what it says of its training.

        Raises:
            Fenced: as for :meth:`check`.
        """
        member = self.check(ticket).members[ticket.rank]
        member.expires_at = now + self.lease_sec
        member.busy, member.waits = busy, waits
        if figures is not None:
            member.training.note(figures, now)
        if step is not None:
            member.step = max(member.step, step)

    def leave_in_order(self, ticket: Ticket) -> None:
        """Removes a member that has finished.

        Raises:
            Fenced: as for :meth:`check`.
        """
        self._remove(self.check(ticket), ticket.rank)

    def withdraw(self, ticket: Ticket) -> Job | None:
        """Removes a candidate at once; returns its job, or None when the ticket is not a member's."""
        job = self.jobs.get(ticket.job_id)
        if job is None or ticket.rank not in job.members or job.members[ticket.rank].ticket != ticket:
            return None
        self._remove(job, ticket.rank)
        return job

    def expire(self, now: float, waited: Collection[int] = ()) -> list[Ticket]:
        """Removes the members whose lease has ended, and returns their tickets.

        Args:
            now: the present time, in seconds.
            waited: jobs whose late members something waits for, besides other members.
        """
        ended = [
            member.ticket
            for job_id, job in self.jobs.items()
            for member in job.members.values()
            if member.expires_at <= now
            and (
                job_id in waited
                or member.expires_at + (_LEASES - 1) * self.lease_sec <= now
                or _is_waited_for(job, member, now)
            )
        ]
        for ticket in ended:
            self._remove(self.jobs[ticket.job_id], ticket.rank)
        return ended

    def forget_ended(self, in_use: Collection[int], now: float) -> list[int]:
        """Forgets jobs that ended long ago; jobs are forgotten earlier when very many have ended.

        Args:
            in_use: jobs that are not forgotten although they have no members.
            now: the present time, in seconds.

        Returns:
            The ids of the forgotten jobs.
        """
        running = self.jobs.keys() | set(in_use)
        ranks = {job_id: len(self.identities.get(job_id, ())) for job_id in self.names}
        forgotten = self._ended.to_forget(ranks, running, now)
        for job_id in forgotten:
            del self.names[job_id]
            self.identities.pop(job_id, None)
        return forgotten

    def extend(self, seconds: float) -> None:
        """Extends every lease by a time in which no heartbeat could arrive."""
        for job in self.jobs.values():
            for member in job.members.values():
                member.expires_at += seconds

    def waiting_error(self, job: Job, ticket: Ticket, waited_sec: float) -> DeadlineExceeded:
        """Returns the error for a candidate whose other ranks did not register in time."""
        missing = job.missing_ranks()
        return DeadlineExceeded(
            f"{len(job.members)} of {job.terms.world_size} ranks of job {job.full_name} came in {waited_sec:.1f} s; "
            f"rank {ticket.rank} waited for {'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}"
        )

    def _job(self, namespace: str, name: str, rank: int, terms: JobTerms) -> Job:
        """Returns the job with these terms, which is created when there is none."""
        full_name = f"{namespace}/{name}"
        job_id = id_of_name(full_name)
        if self.names.setdefault(job_id, full_name) != full_name:
            raise FailedPrecondition(
                f"job {full_name} hashes to the id of {self.names[job_id]} ({job_id}); choose another name"
            )
        job = self.jobs.get(job_id)
        if job is None:
            job = self.jobs[job_id] = Job(job_id, namespace, name, terms, generation=self.new_generation())
        others = [member for other, member in job.members.items() if other != rank]
        if (
            others
            and job.gathered
            and terms.staleness != 0
            and terms == replace(job.terms, world_size=terms.world_size)
        ):
            job.terms = terms = replace(terms, world_size=max(terms.world_size, job.terms.world_size))
        if job.terms != terms and others:
            field_name = next(
                f for f in ("world_size", "staleness", "grad_scale", "quorum") if _differs(job.terms, terms, f)
            )
            raise FailedPrecondition(
                f"job {full_name}: {field_name} is {getattr(job.terms, field_name)!r} for rank "
                f"{others[0].ticket.rank} and {getattr(terms, field_name)!r} for rank {rank}; its workers must agree"
            )
        if job.terms != terms:
            self._begin_generation(job)
            job.terms = terms
        return job

    def _begin_generation(self, job: Job) -> None:
        job.members.clear()
        job.generation = self.new_generation()
        job.gathered = False
        job.revision += 1

    def new_generation(self) -> int:
        """Returns a number that no clock of any job had or will have."""
        self.next_generation += 1
        return self.next_generation - 1

    def begin_clock(self, job: Job, generation: int) -> int:
        """Lets the same members begin a new clock together.

        Args:
            job: the job of these members.
            generation: the number that was reserved for the clock; another one is used when the job has begun a newer
                clock meanwhile.

        Returns:
            The generation of the new clock.
        """
        job.generation = generation if generation > job.generation else self.new_generation()
        job.revision += 1
        return job.generation

    def _remove(self, job: Job, rank: int) -> None:
        del job.members[rank]
        job.revision += 1
        if not job.members:
            del self.jobs[job.job_id]


def _is_waited_for(job: Job, late: Member, now: float) -> bool:
    """Whether another member waits for a late one: it says so, or its next step needs one that the late one owes."""
    others = [member for member in job.members.values() if member.expires_at > now]
    if any(member.waits for member in others):
        return True
    terms = job.terms
    if terms.staleness is None:
        return False
    if terms.quorum is not None:
        return 0 < len(others) < terms.quorum
    return any(member.step - late.step > terms.staleness for member in others)


def _differs(one: JobTerms, other: JobTerms, field_name: str) -> bool:
    return bool(getattr(one, field_name) != getattr(other, field_name))
