"""Jobs that ended are forgotten in time, and their numbers never come again."""

from __future__ import annotations

import random

import pytest

from sparserow.proto.errors import Fenced
from sparserow.ps_server.coordinator.state import data_leases, ended_jobs
from sparserow.ps_server.coordinator.state.data_leases import DataLeases, LeaseRequest
from sparserow.ps_server.coordinator.state.membership import JobTerms, Membership

TERMS = JobTerms(1, 2, "mean")
HOUR = 3600.0


def run(jobs: Membership, name: str = "ctr", terms: JobTerms = TERMS) -> tuple[int, list[int], int]:
    """A job from its beginning to its end: its id, its workers' ids and its generation."""
    tickets = [jobs.register("ads", name, rank, terms) for rank in range(terms.world_size)]
    generation = jobs.check(tickets[0]).generation
    for ticket in tickets:
        jobs.leave_in_order(ticket)
    return tickets[0].job_id, [ticket.worker_id for ticket in tickets], generation


def test_a_name_that_is_used_again_within_the_hour_has_its_worker_again() -> None:
    jobs = Membership(10.0)
    job_id, workers, generation = run(jobs)
    assert jobs.forget_ended([], 100.0) == []
    assert jobs.forget_ended([], 100.0 + HOUR - 1) == []
    assert jobs.origin(job_id, workers[0], 1) == ("ads/ctr", 0)
    again = run(jobs)
    assert again[:2] == (job_id, workers)
    assert again[2] > generation


def test_a_forgotten_name_has_new_workers_and_a_new_clock() -> None:
    jobs = Membership(10.0)
    job_id, workers, generation = run(jobs)
    jobs.forget_ended([], 100.0)
    assert jobs.forget_ended([job_id], 100.0 + HOUR) == [], "its shards are still to be told of its end"
    jobs.forget_ended([], 200.0)
    assert jobs.forget_ended([], 200.0 + HOUR) == [job_id]
    assert (jobs.names, jobs.identities) == ({}, {})
    with pytest.raises(Fenced, match="not known as a member"):
        jobs.origin(job_id, workers[0], 1)
    again = run(jobs)
    assert again[0] == job_id
    assert again[1] != workers
    assert again[2] > generation


def test_a_job_that_runs_is_never_forgotten() -> None:
    jobs = Membership(10.0)
    ticket = jobs.register("ads", "ctr", 0, TERMS)
    assert all(jobs.forget_ended([], now) == [] for now in (0.0, 2 * HOUR, 4 * HOUR))
    jobs.leave_in_order(ticket)
    assert jobs.forget_ended([], 4 * HOUR) == [], "it ended just now"


@pytest.mark.parametrize(("name", "most", "kept"), [("MOST_JOBS", 5, 5), ("MOST_RANKS", 9, 3)])
def test_very_many_jobs_shorten_the_memory(monkeypatch: pytest.MonkeyPatch, name: str, most: int, kept: int) -> None:
    monkeypatch.setattr(ended_jobs, name, most)
    jobs = Membership(10.0)
    for number in range(20):
        run(jobs, f"job{number}", JobTerms(3, 2, "mean"))
        jobs.forget_ended([], float(number))
    assert list(jobs.names.values()) == [f"ads/job{number}" for number in range(20 - kept, 20)]


def test_no_worker_id_and_no_generation_comes_twice() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    jobs, now = Membership(10.0, memory_sec=5.0), 0.0
    clocks: set[int] = set()
    epochs: dict[int, int] = {}  # by worker id: the newest
    for _ in range(2_000):
        now += rng.random()
        terms = JobTerms(rng.randint(1, 3), rng.choice([0, 2, None]), "mean")
        tickets = [jobs.register("ads", f"job{rng.randrange(4)}", 0, terms)]
        name = jobs.check(tickets[0]).name
        tickets += [jobs.register("ads", name, rank, terms) for rank in range(1, terms.world_size)]
        job = jobs.check(tickets[-1])
        assert job.generation not in clocks
        clocks.add(job.generation)
        for member in [member.ticket for member in job.members.values()]:
            assert member.epoch == epochs.get(member.worker_id, 0) + 1
            epochs[member.worker_id] = member.epoch
            jobs.leave_in_order(member)
        jobs.forget_ended([], now)
    assert len(epochs) > 20, "some were forgotten"


def test_the_data_of_jobs_that_ended_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_leases, "MOST_JOBS", 3)
    data = DataLeases()
    for job_id in range(10):
        data.answer(job_id, 1, LeaseRequest("run", 1, 4, (), 0), (job_id, 1), {(job_id, 1)})
        data.bound([0, job_id])
    assert list(data.jobs) == [0, 6, 7, 8, 9]
