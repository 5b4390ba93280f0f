"""``sr.data.ClickDataset`` on a cluster: a checkpoint has its place, and a namespace its statistics."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import sparserow as sr

ROWS, BATCH = 400, 50


class Net(nn.Module):
    """A table, and a number beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.head = nn.Embedding(100, 4), nn.Linear(5, 1)

    def forward(self, user: torch.Tensor, age: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.user(user), age[:, None]], dim=1)).squeeze(1)


def dataset(folder: Path, session: sr.Session | None = None) -> sr.data.ClickDataset:
    kinds = sr.features
    features = kinds.Features([kinds.IdFeature("user", modulo=100), kinds.NumericFeature("age", scale="standardize")])
    return sr.data.ClickDataset(
        str(folder),
        features,
        file_format="parquet",
        columns={"label": "click"},
        batch_size=BATCH,
        session=session,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "log").mkdir()
    draw = np.random.default_rng(1)
    columns = {"click": draw.integers(0, 2, ROWS), "user": draw.integers(0, 99, ROWS), "age": draw.random(ROWS)}
    pq.write_table(pa.table(columns), tmp_path / "log" / "a.parquet")
    return tmp_path / "log"


def test_a_run_goes_on_at_the_batch_after_its_checkpoint(folder: Path, tmp_path: Path) -> None:
    read: list[list[float]] = []

    def train(session: sr.Session, ahead: Any, model: nn.Module, steps: int) -> None:
        dense = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in islice(ahead, steps):
            read.append(batch.tensors["age"].tolist())
            nn.functional.binary_cross_entropy_with_logits(model(**batch.tensors), batch.labels).backward()
            session.step(dense)

    whole = [batch.tensors["age"].tolist() for batch in dataset(folder)]
    with sr.local_cluster(shards=1) as cluster:
        with sr.connect(cluster.address, "ads") as session:
            batches = dataset(folder, session)
            model = session.distribute(Net(), optimizer=sr.optim.Adagrad(lr=0.1), min_rows=1)
            ahead = session.prefetch(batches, always=True)
            train(session, ahead, model, 3)
            statistics = batches.features.set.statistics
            session.save(str(tmp_path / "ckpt"), model=model, reader=ahead)
        with sr.connect(cluster.address, "ads") as session:
            later = dataset(folder, session)
            assert later.features.set.statistics == statistics, "the namespace keeps them"
            model = session.distribute(Net(), optimizer=sr.optim.Adagrad(lr=0.1), min_rows=1)
            session.restore(str(tmp_path / "ckpt"), model=model, reader=later)
            train(session, session.prefetch(later, always=True), model, 99)
    assert read == whole


def test_a_loader_with_workers_is_refused(folder: Path) -> None:
    with pytest.raises(sr.errors.FailedPrecondition, match="num_workers=0"):
        list(DataLoader(dataset(folder), batch_size=None, num_workers=1))
