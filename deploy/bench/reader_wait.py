"""The part of ``bench reader`` that trains: the share of a step in which the training thread waits for the reader.

A job's model has 26 tables of 64 columns, an MLP above them, and one shard process; its batches come from Parquet with
features, shuffled in windows, through ``session.prefetch`` of depth 2. A prefetched batch is waited for as well where
its rows are late. So the same steps run with the same batches from memory, and the difference is the reader's part.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor, nn

from ...proto.config.job import JobConfig
from ...proto.optim import Adagrad
from ...worker.api.connect import connect
from ...worker.data import Batch, ReadOptions
from ...worker.data.sources import fit_features, open_reader
from ..launch.local_cluster import local_cluster
from .harness import Figure, median

DIM, DEPTH = 64, 2
LIMIT_OF_WAIT = 2.0
_DROPPED = DEPTH + 2  # steps of a pass for which nothing was prefetched


class _ClickModel(nn.Module):
    """A table for each key of a sample, and an MLP 64-64 over rows and numbers."""

    def __init__(self, rows: int, keys: int, numbers: int) -> None:
        super().__init__()
        self._rows = rows
        self.tables = nn.ModuleList(nn.Embedding(rows, DIM, sparse=True) for _ in range(keys))
        widths = [keys * DIM + numbers, 64, 64]
        hidden = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
        self.mlp = nn.Sequential(*hidden, nn.Linear(64, 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        ids = torch.remainder(sparse, self._rows)
        rows = [table(ids[:, at]) for at, table in enumerate(self.tables)]
        logits: Tensor = self.mlp(torch.cat([*rows, dense], dim=1))
        return logits.squeeze(1)


def measure_wait(job: JobConfig, batch: int, rows: int, turns: int) -> list[Figure]:
    """Returns the time of a step, and the share of it that the reader is waited for.

    Args:
        job: a job over Parquet with features.
        batch: the number of samples of a batch.
        rows: the number of rows of each table.
        turns: how often the file is trained on, after once to warm up.
    """
    options = ReadOptions(batch_size=batch, shuffle=True)
    reader = open_reader(job.data, "train", fit_features(job.data), options)
    memory = [each for each in reader if isinstance(each, Batch) and len(each) == batch]
    model = _ClickModel(rows, len(memory[0].names.sparse), len(memory[0].names.dense))
    shares: dict[str, list[float]] = {"reader": [], "memory": []}
    steps: list[float] = []
    with local_cluster(shards=1) as cluster, connect(cluster.address, "reader-wait", staleness=DEPTH) as session:
        remote = session.distribute(model, optimizer=Adagrad(lr=0.05), min_rows=1)
        dense = torch.optim.Adam(remote.parameters(), lr=1e-3)

        def run(batches: Iterable[object]) -> tuple[float, float]:
            """Returns the seconds of a step, and the share of them before its batch is there."""
            waited = total = 0.0
            count, ahead = 0, iter(session.prefetch(batches, depth=DEPTH))
            while True:
                began = time.perf_counter()
                found = next(ahead, None)
                there = time.perf_counter()
                if not isinstance(found, Batch):
                    return total / count, waited / total
                logits = remote(found.dense, found.sparse)
                nn.functional.binary_cross_entropy_with_logits(logits, found.labels).backward()
                session.step(dense)
                count += 1
                if count > _DROPPED:
                    waited, total = waited + there - began, total + time.perf_counter() - began

        for turn in range(turns + 1):
            for name, batches in (("reader", reader), ("memory", memory)):
                seconds, share = run(batches)
                if turn:
                    shares[name].append(share)
                    if name == "reader":
                        steps.append(seconds)
    with_reader, from_memory = median(shares["reader"]) * 100, median(shares["memory"]) * 100
    what = f"{len(memory[0].names.sparse)} tables x {DIM}, batch {batch}, prefetch {DEPTH}, one shard"
    waits = max(with_reader - from_memory, 0.0)
    return [
        Figure(f"a step of training on it: {what}", median(steps) * 1000, "ms", higher_is_better=False),
        Figure("of it, waiting for a batch from memory", from_memory, "%", higher_is_better=False),
        Figure("of it, waiting for the reader beyond that", waits, "%", LIMIT_OF_WAIT, higher_is_better=False),
    ]
