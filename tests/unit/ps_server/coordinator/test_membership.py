"""Jobs: gathering, agreement, leases on a clock of the test's own, fencing, generations."""

from __future__ import annotations

import pytest

from sparserow.proto.errors import FailedPrecondition, Fenced, InvalidArgument
from sparserow.ps_server.coordinator.state.membership import JobTerms, Membership, Ticket

LEASE = 10.0
SYNC = JobTerms(world_size=2, staleness=0, grad_scale="mean")
ASYNC = JobTerms(world_size=2, staleness=None, grad_scale="mean")
BOUNDED = JobTerms(world_size=2, staleness=2, grad_scale="mean")
QUORUM = JobTerms(world_size=3, staleness=0, grad_scale="mean", quorum=2)


@pytest.fixture
def jobs() -> Membership:
    return Membership(LEASE)


def gathered(jobs: Membership, terms: JobTerms = SYNC, now: float = 0.0) -> list[Ticket]:
    tickets = [jobs.register("ads", "ctr", rank, terms) for rank in range(terms.world_size)]
    for ticket in tickets:
        jobs.admit(ticket, now)
    return tickets


def test_a_job_is_gathered_when_every_rank_has_come(jobs: Membership) -> None:
    first = jobs.register("ads", "ctr", 1, SYNC)
    job = jobs.check(first)
    assert (job.gathered, job.missing_ranks()) == (False, [0])
    second = jobs.register("ads", "ctr", 0, SYNC)
    assert (job.gathered, job.missing_ranks()) == (True, [])
    assert first.worker_id != second.worker_id
    assert (first.epoch, second.epoch) == (1, 1)


@pytest.mark.parametrize(
    ("terms", "field", "old", "new"),
    [
        (JobTerms(3, 0, "mean"), "world_size", "2", "3"),
        (JobTerms(2, None, "mean"), "staleness", "0", "None"),
        (JobTerms(2, 4, "mean"), "staleness", "0", "4"),
        (JobTerms(2, 0, "sum"), "grad_scale", "'mean'", "'sum'"),
        (JobTerms(2, 0, "mean", quorum=1), "quorum", "None", "1"),
    ],
)
def test_workers_of_a_job_must_agree(jobs: Membership, terms, field, old, new) -> None:
    first = jobs.register("ads", "ctr", 0, SYNC)
    with pytest.raises(FailedPrecondition, match=f"job ads/ctr: {field} is {old} for rank 0 and {new} for rank 1"):
        jobs.register("ads", "ctr", 1, terms)
    assert jobs.check(first).terms == SYNC
    assert jobs.check(first).missing_ranks() == [1]


@pytest.mark.parametrize("terms", [JobTerms(2, 0, "mean", quorum=3), JobTerms(2, 1, "mean", quorum=1)])
def test_a_quorum_is_of_the_workers_of_a_synchronous_job(jobs: Membership, terms: JobTerms) -> None:
    with pytest.raises(InvalidArgument, match=f"quorum: {terms.quorum} is not allowed; allowed: 1 to 2 workers"):
        jobs.register("ads", "ctr", 0, terms)


def test_a_lone_rank_may_come_again_with_other_terms(jobs: Membership) -> None:
    old = jobs.register("ads", "ctr", 0, SYNC)
    new = jobs.register("ads", "ctr", 0, JobTerms(1, 3, "sum"))
    assert jobs.check(new).gathered
    assert jobs.check(new).terms.staleness == 3
    with pytest.raises(Fenced):
        jobs.check(old)


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_must_be_below_the_world_size(jobs: Membership, rank: int, world_size: int) -> None:
    with pytest.raises(InvalidArgument, match="rank"):
        jobs.register("ads", "ctr", rank, JobTerms(world_size, 0, "mean"))


def test_a_lease_ends_unless_it_is_renewed(jobs: Membership) -> None:
    zero, one = gathered(jobs, now=100.0)
    jobs.heartbeat(zero, step=5, now=109.0)
    assert jobs.expire(109.9) == []
    revision = jobs.check(zero).revision
    assert jobs.expire(110.0) == [one]
    assert jobs.check(zero).revision > revision
    assert list(jobs.check(zero).members) == [0]
    with pytest.raises(Fenced, match=r"worker 2 \(epoch 1\) is not a member of job ads/ctr: its lease has ended"):
        jobs.heartbeat(one, step=5, now=110.0)
    assert jobs.expire(138.9) == [], "nothing waits for the last one"
    assert jobs.expire(139.0) == [zero]
    assert jobs.jobs == {}


@pytest.mark.parametrize("terms", [SYNC, BOUNDED, ASYNC, QUORUM], ids=["sync", "bounded", "async", "quorum"])
@pytest.mark.parametrize("ahead", [0, 1, 2, 3, 50])
def test_a_late_worker_stays_until_a_step_needs_it(jobs: Membership, terms: JobTerms, ahead: int) -> None:
    late, *others = gathered(jobs, terms, now=100.0)
    jobs.heartbeat(late, step=7, now=100.0)
    for other in others:
        jobs.heartbeat(other, step=7 + ahead, now=109.0)
    needs_it = {SYNC: ahead > 0, BOUNDED: ahead > 2, ASYNC: False, QUORUM: False}[terms]
    assert jobs.expire(110.0) == ([late] if needs_it else [])
    if not needs_it:
        jobs.heartbeat(late, step=8, now=129.9)
        for other in others:
            jobs.heartbeat(other, step=8, now=129.9)
        assert jobs.expire(139.8) == []
        jobs.check(late)


def test_a_quorum_needs_a_late_worker_when_too_few_others_are_there(jobs: Membership) -> None:
    first, second, third = gathered(jobs, QUORUM, now=100.0)
    jobs.heartbeat(first, step=9, now=109.0)
    assert jobs.expire(110.0) == [second, third], "one of a quorum of two waits"


def test_a_late_worker_leaves_when_another_one_waits_for_it(jobs: Membership) -> None:
    late, other = gathered(jobs, ASYNC, now=100.0)
    jobs.heartbeat(other, step=None, now=109.0, waits=True)
    assert jobs.expire(109.9) == [], "its lease runs"
    assert jobs.expire(110.0) == [late]


def test_one_that_waits_and_is_late_itself_ends_no_lease(jobs: Membership) -> None:
    late, other = gathered(jobs, ASYNC, now=100.0)
    jobs.heartbeat(other, step=None, now=100.0, waits=True)
    assert jobs.expire(111.0) == []
    assert jobs.expire(111.0, waited=[late.job_id]) == [late, other]


def test_a_job_of_which_something_waits_keeps_those_that_are_in_time(jobs: Membership) -> None:
    late, other = gathered(jobs, ASYNC, now=100.0)
    jobs.heartbeat(other, step=3, now=105.0)
    assert jobs.expire(110.0, waited=[12345]) == []
    assert jobs.expire(110.0, waited=jobs.jobs) == [late]


def test_the_error_names_the_lease(jobs: Membership) -> None:
    (ticket,) = gathered(jobs, JobTerms(1, None, "mean"), now=0.0)
    assert jobs.expire(30.0) == [ticket]
    with pytest.raises(Fenced, match=r"its lease has ended \(worker_lease: 10 s, three times as long where nothing"):
        jobs.heartbeat(ticket, step=5, now=30.0)


def test_a_candidate_has_no_lease_to_lose(jobs: Membership) -> None:
    ticket = jobs.register("ads", "ctr", 0, SYNC)
    assert jobs.expire(1e9) == []
    jobs.check(ticket)


def test_a_rank_that_registers_again_fences_its_former_self(jobs: Membership) -> None:
    (old,) = gathered(jobs, JobTerms(1, 0, "mean"))
    new = jobs.register("ads", "ctr", 0, JobTerms(1, 0, "mean"))
    assert (new.worker_id, new.epoch) == (old.worker_id, old.epoch + 1)
    with pytest.raises(Fenced):
        jobs.find(old.job_id, old.worker_id, old.epoch)
    assert jobs.find(new.job_id, new.worker_id, new.epoch) == new


def test_synchronous_workers_go_back_together(jobs: Membership) -> None:
    zero, one = gathered(jobs)
    generation = jobs.check(zero).generation
    jobs.heartbeat(one, step=40, now=1.0)
    again = jobs.register("ads", "ctr", 0, SYNC)
    job = jobs.check(again)
    assert (job.generation, job.gathered, job.missing_ranks()) == (generation + 1, False, [1])
    with pytest.raises(Fenced):
        jobs.check(one)
    assert jobs.register("ads", "ctr", 1, SYNC).epoch == 2
    assert job.gathered
    assert jobs.admit(again, 2.0) == 0  # the clock starts anew


@pytest.mark.parametrize("goes", ["leaves in order", "lease ends"])
def test_a_synchronous_worker_that_left_and_comes_back_begins_a_new_clock(jobs: Membership, goes: str) -> None:
    zero, one = gathered(jobs)
    if goes == "lease ends":
        jobs.heartbeat(one, step=40, now=100.0)
        assert jobs.expire(100.0) == [zero]
    else:
        jobs.leave_in_order(zero)
    again = jobs.register("ads", "ctr", 0, SYNC)
    job = jobs.check(again)
    assert (job.generation, job.gathered, job.missing_ranks()) == (2, False, [1])
    with pytest.raises(Fenced):
        jobs.check(one)
    jobs.register("ads", "ctr", 1, SYNC)
    assert jobs.admit(again, 101.0) == 0


@pytest.mark.parametrize("terms", [ASYNC, JobTerms(2, 3, "mean")])
def test_without_a_barrier_a_rank_comes_back_alone_at_the_step_of_the_others(jobs: Membership, terms: JobTerms) -> None:
    zero, one = gathered(jobs, terms)
    jobs.heartbeat(one, step=40, now=1.0)
    again = jobs.register("ads", "ctr", 0, terms)
    assert jobs.check(one).gathered
    assert jobs.check(one).generation == 1
    assert jobs.admit(again, 2.0) == 40
    with pytest.raises(Fenced):
        jobs.check(zero)


@pytest.mark.parametrize("terms", [ASYNC, JobTerms(2, 3, "mean")])
def test_a_running_job_without_a_barrier_grows(jobs: Membership, terms: JobTerms) -> None:
    zero, one = gathered(jobs, terms)
    two = jobs.register("ads", "ctr", 2, JobTerms(3, terms.staleness, "mean"))
    job = jobs.check(two)
    assert (job.gathered, job.generation, job.terms.world_size) == (True, 1, 3)
    assert jobs.check(zero) is jobs.check(one) is job
    assert jobs.register("ads", "ctr", 1, terms).epoch == 2  # who knows only the size of the start
    assert job.terms.world_size == 3
    with pytest.raises(FailedPrecondition, match="staleness is"):
        jobs.register("ads", "ctr", 2, JobTerms(3, 0, "mean"))


def test_a_job_is_over_without_members_and_the_next_one_is_another_generation(jobs: Membership) -> None:
    zero, one = gathered(jobs)
    generation = jobs.check(zero).generation
    for ticket in (zero, one):
        jobs.leave_in_order(ticket)
        with pytest.raises(Fenced):
            jobs.leave_in_order(ticket)
    assert jobs.jobs == {}
    again = jobs.register("ads", "ctr", 0, JobTerms(1, None, "sum"))
    assert jobs.check(again).generation == generation + 1
    assert (again.worker_id, again.epoch) == (zero.worker_id, 2)


def test_the_late_are_told_who_is_missing(jobs: Membership) -> None:
    ticket = jobs.register("ads", "ctr", 1, JobTerms(4, 0, "mean"))
    error = jobs.waiting_error(jobs.check(ticket), ticket, 2.5)
    assert str(error) == "1 of 4 ranks of job ads/ctr came in 2.5 s; rank 1 waited for ranks 0, 2, 3"


def test_jobs_of_other_names_and_namespaces_are_apart(jobs: Membership) -> None:
    tickets = [
        jobs.register("ads", "a", 0, SYNC),
        jobs.register("ads", "b", 0, ASYNC),
        jobs.register("shop", "a", 0, ASYNC),
    ]
    assert len({ticket.job_id for ticket in tickets}) == 3
    assert len({ticket.worker_id for ticket in tickets}) == 3
    with pytest.raises(InvalidArgument, match="job: 'a/b'"):
        jobs.register("ads", "a/b", 0, SYNC)


@pytest.mark.parametrize("staleness", [None, 3, 0])
def test_who_leaves_is_gone_at_once(jobs: Membership, staleness: int | None) -> None:
    zero, one = gathered(jobs, JobTerms(2, staleness, "mean"))
    revision = jobs.check(one).revision
    jobs.leave_in_order(zero)
    assert list(jobs.check(one).members) == [1]
    assert jobs.check(one).revision > revision


def test_who_is_leaving_has_no_say_in_the_next_terms(jobs: Membership) -> None:
    zero, _ = gathered(jobs)
    jobs.leave_in_order(zero)
    with pytest.raises(FailedPrecondition, match="for rank 1 and 3 for rank 0"):
        jobs.register("ads", "ctr", 0, JobTerms(3, 0, "mean"))
    again = jobs.register("ads", "ctr", 1, JobTerms(3, 0, "mean"))
    assert jobs.check(again).missing_ranks() == [0, 2]


def test_a_candidate_that_withdraws_is_gone(jobs: Membership) -> None:
    ticket = jobs.register("ads", "ctr", 0, SYNC)
    assert jobs.withdraw(ticket) is not None
    assert jobs.withdraw(ticket) is None
    assert jobs.jobs == {}


def test_a_worker_that_was_busy_when_it_was_last_heard_is_not_waited_for(jobs: Membership) -> None:
    """It is a member for up to three times its lease while nothing waits for it."""
    zero, one = gathered(jobs, now=100.0)
    job = jobs.check(zero)
    jobs.heartbeat(one, step=7, now=100.0, busy=True)
    assert job.has_busy_peer(zero, 109.9)
    assert not job.has_busy_peer(one, 109.9)
    assert not job.has_busy_peer(zero, 110.0)
    assert one.rank in job.members


def test_leases_are_longer_by_the_time_nobody_could_be_heard(jobs: Membership) -> None:
    zero, one = gathered(jobs, now=0.0)
    jobs.extend(7.0)
    assert jobs.expire(16.9, jobs.jobs) == []
    assert jobs.expire(17.0, jobs.jobs) == [zero, one]
