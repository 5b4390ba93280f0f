"""Hints: shards have the rows of later batches in memory where reads of their SSD wait; counts, no times."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import sparserow as sr
from sparserow.deploy.launch.local_cluster import local_cluster
from sparserow.proto import control_pb2 as pb
from sparserow.proto.config.job import JobConfig
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import InvalidArgument
from sparserow.proto.options.document import load_config
from sparserow.worker.prefetch import batches as prefetch_batches
from sparserow.worker.prefetch.trials import Trial
from sparserow.worker.session.session_stats import SessionStats
from sparserow.worker.training.ps_backend import PsBackend
from sparserow_process import wait_until

DIM = 32
ROWS = 80_000  # more than the budget of the one shard has room for
BATCH = 500
STEPS = 24


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(ROWS, DIM)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.emb(ids).sum()


def tier(control: ControlClient) -> pb.TierUsage:
    return control.status().shards[0].tier


class Counted:
    """A loader that counts what it gave."""

    def __init__(self, batches: list[torch.Tensor]) -> None:
        self.batches = batches
        self.loaded = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for batch in self.batches:
            self.loaded += 1
            yield batch


def forget_cached(folder: Path) -> None:
    """Takes the files of a shard out of the system's cache."""
    for path in folder.rglob("rows/*"):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def train(
    folder: Path, hints: int, *, is_cold: bool = True, always: bool = True
) -> tuple[int, int, np.ndarray, SessionStats]:
    """Misses of pulls and commits, keys brought ahead, the weights at the end, and the counters of the session.

    Hints are waited for where the files are cold, which is where a shard takes them, and where all are sent.
    """
    with (
        local_cluster(shards=1, memory_budget="16MiB", ssd_path=folder) as cluster,
        sr.connect(cluster.address, namespace="n") as session,
        ControlClient(cluster.address) as control,
    ):
        model = session.distribute(Net(), optimizer=sr.optim.Adagrad(lr=0.1), min_rows=1, carry_weights=False)
        table = session.table("emb")
        for part in np.array_split(np.arange(ROWS), 20):
            table.push(part, np.ones((len(part), DIM), np.float32))
        order = np.random.default_rng(5).permutation(ROWS)[: STEPS * BATCH]
        batches = [torch.from_numpy(part) for part in np.array_split(order, STEPS)]
        assert control.status().shards[0].tables[0].ssd_rows > ROWS // 20
        if is_cold:
            forget_cached(folder)
        else:
            for part in np.array_split(np.arange(ROWS), 20):  # the cache has the files; now the shard has read them
                table.pull(part)
        before = tier(control)
        loader = Counted(batches)
        for number, batch in enumerate(session.prefetch(loader, depth=1, hints=hints, ids=ids, always=always)):
            model(batch).backward()
            assert session.step()
            if is_cold:
                forget_cached(folder)
            if hints == 0 or not is_cold or not always:
                continue
            wanted = min(number + 1 + hints, STEPS)  # what was loaded is known to the shard by now or soon
            wait_until(lambda wanted=wanted: session.stats().rows_hinted >= wanted * BATCH, "the shard takes the hints")
            wait_until(lambda: settled(control), "the shard brings what it was told of")
        after = tier(control)
        assert loader.loaded == STEPS
        weights = table.pull(order)
        return after.misses - before.misses, after.brought_ahead - before.brought_ahead, weights, session.stats()


def ids(batch: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"emb": batch}


def settled(control: ControlClient) -> bool:
    """Whether the shard reads nothing on behalf of hints at the moment, as far as two looks can tell."""
    first = tier(control)
    time.sleep(0.02)  # its turn, on a busy machine
    second = tier(control)
    return first.brought_ahead == second.brought_ahead and first.reads == second.reads


def test_hinted_rows_are_in_memory_when_they_are_pulled(tmp_path: Path) -> None:
    (tmp_path / "without").mkdir()
    (tmp_path / "with").mkdir()
    missed, ahead, weights, _ = train(tmp_path / "without", hints=0)
    assert ahead == 0
    assert missed > STEPS * BATCH // 10
    missed_with, ahead_with, weights_with, _ = train(tmp_path / "with", hints=4)
    print(f"misses of {STEPS * BATCH:,} keys: {missed:,} without hints, {missed_with:,} with; {ahead_with:,} ahead")
    assert missed_with < missed // 2
    assert ahead_with > missed // 2
    np.testing.assert_array_equal(weights, weights_with)


def test_hints_are_declined_where_reads_do_not_wait_for_the_disk(tmp_path: Path) -> None:
    missed, ahead, _, _ = train(tmp_path, hints=4, is_cold=False)
    print(f"misses of {STEPS * BATCH:,} keys: {missed:,}; {ahead:,} ahead")
    assert missed > STEPS * BATCH // 10
    assert ahead == 0


class InTurns(Trial):
    """Leaves out the hints of every second batch that is taken."""

    def note(self, was_on: bool, now: float) -> None:
        del was_on, now
        self.is_on = not self.is_on


def test_batches_whose_hints_are_left_out_have_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch_batches, "hint_trial_of", lambda *_: InTurns(5))
    (tmp_path / "without").mkdir()
    (tmp_path / "with").mkdir()
    _, _, weights, stats = train(tmp_path / "without", hints=0)
    assert stats.batches_unhinted == 0
    _, _, weights_with, stats = train(tmp_path / "with", hints=4, always=False)
    assert STEPS // 4 < stats.batches_unhinted < STEPS
    assert 0 < stats.rows_hinted <= (STEPS - stats.batches_unhinted) * BATCH
    np.testing.assert_array_equal(weights, weights_with)


def test_hints_of_shards_without_an_ssd_are_taken_for_nothing() -> None:
    with local_cluster(shards=2) as cluster, sr.connect(cluster.address, namespace="n") as session:
        model = session.distribute(Net(), optimizer=sr.optim.SGD(lr=0.1), min_rows=1, carry_weights=False)
        taken = 0
        for batch in session.prefetch([torch.arange(i, i + 9) for i in range(8)], depth=1, hints=2):
            model(batch).backward()
            assert session.step()
            taken += len(batch)
        assert taken == 72
        assert session.stats().rows_hinted == 0
        with pytest.raises(InvalidArgument, match=r"prefetch\.hints: -1 is not allowed; allowed: >= 0"):
            session.prefetch([], hints=-1)


def test_hints_of_a_job_are_refused_where_no_shard_has_an_ssd() -> None:
    given = [
        "data.train=a",
        "data.test=b",
        "model={class: DLRM, args: {rows: {'*': 1000000}}}",
        "train.prefetch=1",
        "train.prefetch_hints=2",
    ]
    with local_cluster(shards=1) as cluster, sr.connect(cluster.address, namespace="no-ssd") as session:
        job = load_config(JobConfig, None, [*given, f"cluster.address={cluster.address}"])
        with pytest.raises(
            InvalidArgument, match=r"train\.prefetch_hints: it has no effect, as no shard of .* has an SSD"
        ):
            PsBackend(job, session, cluster.address)
