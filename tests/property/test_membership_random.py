"""Random lives of a cluster's workers against the invariants of membership, on a clock of the test's own."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sparserow.proto.errors import FailedPrecondition, Fenced, InvalidArgument
from sparserow.ps_server.coordinator.state.membership import JobTerms, Membership, Ticket

LEASE = 10.0
LEASES = 3  # of a late worker that nothing waits for
JOBS = st.sampled_from(["a", "b"])
TERMS = st.builds(JobTerms, st.integers(1, 3), st.sampled_from([0, 2, None]), st.sampled_from(["mean", "sum"]))


class Lives(RuleBasedStateMachine):
    """Keeps every ticket ever given, and what must never happen again."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs = Membership(LEASE)
        self.now = 0.0
        self.tickets: list[Ticket] = []
        self.gone: set[Ticket] = set()
        self.worker_of: dict[tuple[int, int], int] = {}
        self.renewed: dict[Ticket, float] = {}

    def pick(self, index: int) -> Ticket | None:
        return self.tickets[index % len(self.tickets)] if self.tickets else None

    @rule(name=JOBS, rank=st.integers(-1, 3), terms=TERMS)
    def register(self, name: str, rank: int, terms: JobTerms) -> None:
        try:
            ticket = self.jobs.register("ads", name, rank, terms)
        except InvalidArgument:
            assert not 0 <= rank < terms.world_size
            return
        except FailedPrecondition:
            return
        assert all(ticket.epoch > old.epoch for old in self.tickets if old.worker_id == ticket.worker_id)
        assert self.worker_of.setdefault((ticket.job_id, rank), ticket.worker_id) == ticket.worker_id
        self.gone |= {old for old in self.tickets if (old.job_id, old.rank) == (ticket.job_id, rank)}
        self.tickets.append(ticket)
        found = self.jobs.check(ticket).terms
        assert found == replace(terms, world_size=found.world_size)
        assert found.world_size == terms.world_size or (found.world_size > terms.world_size and terms.staleness != 0)

    @rule(index=st.integers(0, 100))
    def admit(self, index: int) -> None:
        ticket = self.pick(index)
        if ticket is not None and self.is_member(ticket) and self.jobs.check(ticket).gathered:
            self.jobs.admit(ticket, self.now)
            self.renewed[ticket] = self.now

    @rule(index=st.integers(0, 100), step=st.integers(0, 9))
    def heartbeat(self, index: int, step: int) -> None:
        ticket = self.pick(index)
        if ticket is None:
            return
        try:
            found = self.jobs.find(ticket.job_id, ticket.worker_id, ticket.epoch)
        except Fenced:
            assert not self.is_member(ticket)
            self.gone.add(ticket)
            return
        assert found == ticket
        if ticket in self.renewed:
            self.jobs.heartbeat(ticket, step, self.now)
            self.renewed[ticket] = self.now

    @rule(index=st.integers(0, 100))
    def leave(self, index: int) -> None:
        ticket = self.pick(index)
        if ticket is not None and self.is_member(ticket):
            self.jobs.leave_in_order(ticket)
            self.gone.add(ticket)

    @rule(seconds=st.floats(0, 8), is_waited=st.booleans())
    def pass_time(self, seconds: float, is_waited: bool) -> None:
        self.now += seconds
        for ticket in self.jobs.expire(self.now, list(self.jobs.jobs) if is_waited else ()):
            assert self.now - self.renewed[ticket] >= LEASE - 1e-9
            self.gone.add(ticket)
        if is_waited:
            late = [ticket for ticket, renewed in self.renewed.items() if self.now - renewed > LEASE + 1e-9]
            assert not any(self.is_member(ticket) for ticket in late)

    def is_member(self, ticket: Ticket) -> bool:
        try:
            self.jobs.check(ticket)
        except Fenced:
            return False
        return True

    @invariant()
    def who_is_gone_stays_gone(self) -> None:
        assert not any(self.is_member(ticket) for ticket in self.gone)

    @invariant()
    def worker_ids_are_of_one_rank(self) -> None:
        assert len(set(self.worker_of.values())) == len(self.worker_of)

    @invariant()
    def jobs_have_members_within_their_size(self) -> None:
        for job in self.jobs.jobs.values():
            assert job.members
            assert all(0 <= rank < job.terms.world_size for rank in job.members)
            assert job.gathered or job.missing_ranks()

    @invariant()
    def leases_are_kept(self) -> None:
        for ticket, renewed in self.renewed.items():
            if self.is_member(ticket):
                assert self.now - renewed < LEASES * LEASE + 1e-9


Lives.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestLives = Lives.TestCase
