"""The row cache of a session whose model is on a device: its rows are on the host, and results are the same."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparserow as sr
from sparserow.deploy.bench.counting_device import device

ROWS, DIM, BATCH = 400, 16, 64


def seed() -> int:
    given = os.environ.get("SPARSEROW_TEST_SEED")
    chosen = random.randrange(2**32) if given is None else int(given)
    print(f"SPARSEROW_TEST_SEED={chosen}")
    return chosen


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Embedding(ROWS, DIM), nn.Embedding(ROWS, DIM)
        self.bag = nn.EmbeddingBag(ROWS, 2 * DIM, mode="sum")
        self.head = nn.Linear(4 * DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.cat([self.one(ids[:, 0]), self.two(ids[:, 1]), self.bag(ids)], 1)).squeeze(1)


def batches(n: int, start: int, *, zipf: float = 1.3) -> list[Tensor]:
    draw = np.random.default_rng(start)
    return [torch.from_numpy(draw.zipf(zipf, (BATCH, 3)) % ROWS) for _ in range(n)]


def model_on(session: sr.Session, where: torch.device) -> Net:
    torch.manual_seed(1)
    model = Net().to(where)
    return session.distribute(model, optimizer=sr.optim.Adagrad(lr=0.02), min_rows=1, carry_weights=True)


def train(session: sr.Session, model: Net, given: list[Tensor], where: torch.device, prefetch: int) -> list[float]:
    dense = torch.optim.SGD(model.parameters(), lr=0.005)
    source = session.prefetch(given, depth=prefetch, device=where) if prefetch else given
    losses = []
    for ids in source:
        loss = model(ids).square().mean()
        loss.backward()
        session.step(dense)
        losses.append(loss.detach())
    return [float(loss.cpu()) for loss in losses]


@pytest.mark.parametrize("size", [1 << 14, 1 << 20], ids=["some rows", "all rows"])
def test_a_cache_serves_a_model_on_a_device_as_one_on_the_host(size: int) -> None:
    given = batches(25, seed())
    cache = sr.RowCache(size, staleness=2, own_commits="bounded")
    results = []
    for where in (torch.device("cpu"), device()):
        with sr.InProcessCluster(shards=2).connect("beside", staleness=3, cache=cache) as session:
            results.append((train(session, model_on(session, where), given, where, 0), session.stats()))
    (host, on_host), (there, stats) = results
    assert there == pytest.approx(host, rel=1e-5)
    assert stats.cache_hits > 100
    assert (stats.cache_hits, stats.cache_misses) == (on_host.cache_hits, on_host.cache_misses)


def test_prefetched_batches_take_rows_of_the_cache() -> None:
    given = batches(60, 4)
    with sr.InProcessCluster(shards=2).connect("ahead", staleness=4, cache=sr.RowCache(1 << 16, 2)) as session:
        model = model_on(session, device())
        losses = train(session, model, given, device(), 2)
        session.flush()
        stats = session.stats()
        model.eval()
        with torch.no_grad():
            there = model.one(given[0][:, 0]).cpu().numpy()
        assert (there == session.table("one").pull(given[0][:, 0].numpy().astype(np.uint64))).all()
    assert np.isfinite(losses).all()
    assert min(stats.cache_hits, stats.cache_misses) > 100
