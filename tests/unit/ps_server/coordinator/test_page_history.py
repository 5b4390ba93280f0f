"""The last hour of a cluster in a ring of fixed size."""

from __future__ import annotations

import json
import math
import random

import pytest

from sparserow.proto import control_pb2 as pb
from sparserow.proto.status.cluster_status import ClusterStatus, view_of
from sparserow.ps_server.coordinator.page.history import MOST_JOBS, POINTS, SHARD_GROUP, ClusterHistory
from sparserow.ps_server.coordinator.page.series_ring import SeriesRing
from stubbed_page import large_status


def test_a_ring_has_the_newest_points_and_no_more_bytes() -> None:
    ring = SeriesRing(2, 4)
    assert ring.series(0) == []
    for number in range(6):
        ring.add([number, None if number % 2 else -number])
        assert ring.nbytes == 2 * 4 * 4
    assert len(ring) == 4
    assert ring.series(0) == [2, 3, 4, 5]
    assert ring.series(1) == [-2, None, -4, None]
    ring.add([math.inf, math.nan])
    assert ring.series(0) == [3, 4, 5, None], "what is no number is a gap"
    ring.clear([0])
    assert ring.series(0) == [None] * 4
    assert ring.series(1) == [None, -4, None, None]


def test_means_of_groups_end_with_the_newest_point() -> None:
    ring = SeriesRing(1, 10)
    for number in range(7):
        ring.add([None if number == 5 else number])
    assert ring.means(0, 3) == [2, 5], "of 1 to 3, and of 4 to 6 without the gap"
    assert ring.means(0, 8) == []


def test_a_random_ring_equals_a_list() -> None:
    rolls = random.Random(5)
    for _ in range(50):
        width, points = rolls.randint(1, 4), rolls.randint(1, 6)
        ring, kept = SeriesRing(width, points), []
        for _ in range(rolls.randint(0, 15)):
            kept = [*kept, [rolls.choice((None, float(rolls.randint(0, 99)))) for _ in range(width)]][-points:]
            ring.add(kept[-1])
        for series in range(width):
            assert ring.series(series) == [point[series] for point in kept]


def test_a_thousand_shards_take_at_most_four_mebibytes() -> None:
    history = ClusterHistory(1000)
    assert history.nbytes <= 4 << 20
    before = history.nbytes
    view = view_of(None, large_status(1000, 0), 0.0)
    for _ in range(3):
        history.add(view)
    assert history.nbytes == before
    assert len(json.dumps(history.to_document(None))) < 2 << 20


def view(*jobs: str) -> ClusterStatus:
    reply = pb.GetStatusReply(ready=True)
    for number, job in enumerate(jobs):
        reply.jobs.add(job_id=number + 1, namespace=job.partition("/")[0], name=job.partition("/")[2], highest_step=7)
    return view_of(None, reply, 0.0)


def test_jobs_come_and_go_within_the_places_that_exist() -> None:
    history = ClusterHistory(1)
    for number in range(10 * MOST_JOBS):
        history.add(view(f"ads/{number}", "ads/stays"))
    jobs = history.to_document(None)["jobs"]
    assert len(jobs) == MOST_JOBS
    assert jobs["ads/stays"]["highest_step"] == [7] * POINTS
    newest = jobs[f"ads/{10 * MOST_JOBS - 1}"]["highest_step"]
    assert newest == [None] * (POINTS - 1) + [7], "it has no point of the job whose place it took"
    crowd = [f"ads/{number}" for number in range(2 * MOST_JOBS)]
    history.add(view(*crowd))
    assert len(history.to_document(None)["jobs"]) == MOST_JOBS


def test_a_namespace_has_the_series_of_its_jobs_alone() -> None:
    history = ClusterHistory(1)
    history.add(view("ads/a", "feed/b"))
    assert set(history.to_document(["ads"])["jobs"]) == {"ads/a"}
    assert set(history.to_document([])["jobs"]) == set()
    assert set(history.to_document(None)["jobs"]) == {"ads/a", "feed/b"}


def test_a_reading_that_failed_is_a_gap() -> None:
    history = ClusterHistory(2)
    history.add(view_of(None, large_status(2, 1), 0.0))
    history.add(None)
    document = history.to_document(None)
    assert document["cluster"]["rows"] == [30, None]
    assert document["cluster"]["shards_serving"] == [2, None]
    assert document["cluster"]["pull_p99_sec"][0] == pytest.approx(0.0982)
    for _ in range(SHARD_GROUP - 2):
        history.add(None)
    assert history.to_document(None)["shards"]["memory_bytes"] == [[pytest.approx(1 << 30, rel=1e-5)]] * 2
