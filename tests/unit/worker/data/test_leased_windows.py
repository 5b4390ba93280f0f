"""Windows that workers lease from the coordinator's book: each sample once, whatever files and whoever dies."""

from __future__ import annotations

import os
import random
import secrets
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from column_uses import data_of
from sparserow.ps_server.coordinator.state.data_leases import JobData, LeaseRequest
from sparserow.worker.data import Batch, ReadOptions
from sparserow.worker.data.leased import EpochScore, Leased, LeasedReader, Trained
from sparserow.worker.data.sources import fit_features, open_reader, plan_files

ROWS, BATCH, LEASE = 1_000, 16, 70


class Book:
    """The coordinator's leases for one worker, which commits each batch that it took."""

    def __init__(self, data: JobData, rank: int, members: set[tuple[int, int]], order: int) -> None:
        self.data, self.key, self.members, self.order, self.step = data, (rank, 1), members, order, 0

    def lease(self, epoch: int, chunks: int, done: list[int], trained: Trained | None = None) -> Leased:  # noqa: ARG002
        ask = LeaseRequest("r", epoch, chunks, done, self.step, order=self.order)
        answer = self.data.answer(ask, self.key, self.members)
        return Leased(answer.chunk, answer.skip, answer.is_over)

    def report_tested(self, epoch: int, chunks: int, tested: EpochScore) -> None:
        """Nothing is tested here."""


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_each_sample_is_leased_once_whoever_dies(tmp_path: Path, form: str) -> None:
    seed = int(os.environ.get("SPARSEROW_TEST_SEED", secrets.randbits(32)))
    print(f"SPARSEROW_TEST_SEED={seed}")
    draw = random.Random(seed)
    cuts = sorted(draw.randrange(ROWS + 1) for _ in range(4))
    for number, (begin, end) in enumerate(zip([0, *cuts], [*cuts, ROWS], strict=True)):
        if form == "csv":
            (tmp_path / f"{number}.csv").write_text("".join(f"{i % 2},{i},a\n" for i in range(begin, end)) or "\n")
        else:
            table = pa.table(
                {"y": [i % 2 for i in range(begin, end)], "x": range(begin, end), "c": ["a"] * (end - begin)}
            )
            pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=90)
    roles = "label: y, numeric: {x: none}, categorical: [c]}"
    section = f"csv={{columns: [y, x, c], {roles}" if form == "csv" else f"columns={{{roles}"
    path = f"{tmp_path}/*.{form}"
    config = data_of(f"train={path}", f"test={path}", f"format={form}", section)
    plan = plan_files(config, "train")
    features = fit_features(config, plan)
    options = ReadOptions(batch_size=BATCH, shuffle=True, shuffle_rows=1, seed=5)

    windows = -(-ROWS // (-(-LEASE // BATCH) * BATCH))
    reader = open_reader(config, "train", features, options, plan)
    data = JobData("r", 1, 1, windows, order=reader.digest(LEASE))
    members: set[tuple[int, int]] = set()
    passes: dict[int, tuple[Book, Iterator[Batch]]] = {}
    seen: Counter[int] = Counter()
    joined = 0
    for number in range(10_000):
        if data.is_over:
            break
        if len(passes) < 3:
            reader = open_reader(config, "train", features, options, plan)
            book = Book(data, joined, members, reader.digest(LEASE))
            members.add(book.key)
            leased = LeasedReader(reader, lease_rows=LEASE, leases=book, settle=lambda: None, fills=True)
            leased.begin_at(1)
            passes[joined], joined = (book, iter(leased)), joined + 1
        rank = draw.choice(list(passes))
        book, batches = passes[rank]
        batch = next(batches, None)
        if batch is None:
            break
        seen.update(int(x) for x in batch.dense[:, 0])
        book.step += 1
        if draw.random() < 0.03 or number == 20:  # after its commit
            passes.pop(rank)
            members.discard(book.key)
            data.left(book.key, book.step - 1)
    assert data.is_over
    assert seen == Counter(range(ROWS))
    assert joined > 3
