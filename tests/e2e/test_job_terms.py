"""Workers that disagree about their job, two jobs of one name, and a session that a forked child holds."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

import sparserow as sr
from sparserow.proto.control import ControlClient
from sparserow_process import DEADLINE_SEC, wait_until


@pytest.fixture(scope="module")
def cluster() -> Iterator[sr.LocalCluster]:
    with sr.local_cluster(shards=2) as running:
        yield running


@pytest.mark.parametrize("staleness", [-1, 1.5, "0", 2**31])
def test_a_staleness_that_cannot_be(staleness: object) -> None:
    with pytest.raises(
        sr.errors.InvalidArgument, match=r"connect\.staleness: .* is not allowed; allowed: \[0, 2\*\*31\)"
    ):
        sr.connect("127.0.0.1:1", staleness=staleness)  # type: ignore[arg-type]


def test_workers_of_a_job_agree_on_its_terms(cluster: sr.LocalCluster) -> None:
    """The second to come is told both values at once; the first, at its deadline, that it is alone."""
    terms = [("staleness", 0, 2), ("staleness", None, 0), ("grad_scale", "mean", "sum")]
    names = [f"terms-{field}-{first}" for field, first, _ in terms]
    outcomes: dict[str, Exception] = {}

    def come_first(name: str, field: str, first: object) -> None:
        try:
            sr.connect(cluster.address, name, rank=0, world_size=2, gather_sec=8, **{field: first})  # type: ignore[arg-type]
        except sr.errors.SparserowError as error:
            outcomes[name] = error

    waiting = [
        threading.Thread(target=come_first, args=(name, field, first))
        for name, (field, first, _) in zip(names, terms, strict=True)
    ]
    for thread in waiting:
        thread.start()
    with ControlClient(cluster.address) as control:
        wait_until(lambda: {job.name for job in control.status().jobs} >= set(names), "the first of each job")
    for name, (field, first, second) in zip(names, terms, strict=True):
        words = rf"{field} is {first!r} for rank 0 and {second!r} for rank 1; its workers must agree"
        with pytest.raises(sr.errors.FailedPrecondition, match=words):
            sr.connect(cluster.address, name, rank=1, world_size=2, **{field: second})  # type: ignore[arg-type]
    for thread in waiting:
        thread.join(DEADLINE_SEC)
    for name in names:
        assert isinstance(outcomes[name], sr.errors.DeadlineExceeded)
        assert "1 of 2 ranks" in str(outcomes[name])


def test_of_two_jobs_with_one_name_the_later_has_it(cluster: sr.LocalCluster) -> None:
    """The earlier one's worker is fenced: it can change nothing any more. Its table is there for both."""
    with sr.connect(cluster.address, "twins") as early:
        table = early.create_table("t", dim=2, optimizer=sr.optim.SGD(lr=1.0))
        table.push([1], np.ones((1, 2), np.float32))
        with sr.connect(cluster.address, "twins") as late:
            with pytest.raises(sr.errors.Fenced):
                table.push([1], np.ones((1, 2), np.float32))
            late.table("t").push([2], np.ones((1, 2), np.float32))
            np.testing.assert_array_equal(late.table("t").pull([1, 2]), [[-1, -1], [-1, -1]])
        with sr.connect(cluster.address, "twins", job="other") as beside:  # another job of the namespace is no rival
            beside.table("t").push([2], np.ones((1, 2), np.float32))
            np.testing.assert_array_equal(beside.table("t").pull([2]), [[-2, -2]])


def test_a_forked_child_that_closes_its_copy_leaves_the_parent_in_its_job(cluster: sr.LocalCluster) -> None:
    with sr.connect(cluster.address, "fork") as session:
        model = session.distribute(nn.Sequential(nn.Embedding(100, 4)), optimizer=sr.optim.SGD(lr=1.0), min_rows=1)
        model(torch.arange(10)).sum().backward()
        assert session.step()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                with session, pytest.raises(sr.errors.FailedPrecondition, match="before a fork"):
                    session.table("0").pull([1])
                del model, session
                gc.collect()
                os.write(writer, b"closed")
            finally:
                os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        with os.fdopen(reader, "rb") as said:
            assert said.read() == b"closed"
        with ControlClient(cluster.address) as control:
            job = next(job for job in control.status().jobs if job.name == "fork")
            assert len(job.members) == 1
        before = session.table("0").pull(np.arange(10))
        model(torch.arange(10)).sum().backward()
        assert session.step()
        np.testing.assert_allclose(session.table("0").pull(np.arange(10)), before - 1, atol=1e-6)
