"""Rows that a served model keeps on its device, together with what else a version may have: features, newer weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import sparserow as sr
from scored_program import Scorer, batch
from sparserow.deploy.bench.counting_device import COUNTS, device

MODULO = 2**40
KEPT = sr.LookupCache(1 << 22, ttl_ms=3_600_000)


def columns(rows: int, seed: int) -> dict[str, list[Any]]:
    draw = np.random.default_rng(seed)
    tags = [[f"t{each}" for each in draw.integers(0, 30, draw.integers(0, 4))] for _ in range(rows)]
    return {
        "user": [f"u{each}" if each % 7 else None for each in draw.integers(0, 200, rows)],
        "tags": tags,
        "weight": [[float(len(each)) for each in some] for some in tags],
        "history": [draw.integers(0, 90, draw.integers(0, 8)).tolist() for _ in range(rows)],
    }


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with sr.deferred():
            self.users = nn.Embedding(MODULO, 4)
            self.bags = nn.EmbeddingBag(MODULO, 4, mode="sum", include_last_offset=True)
            self.histories = nn.EmbeddingBag(MODULO, 4, mode="mean", include_last_offset=True)

    def forward(self, user: Tensor, tags: tuple[Tensor, Tensor, Tensor], history: tuple[Tensor, Tensor]) -> Tensor:
        bags = self.bags(tags[0], tags[1], per_sample_weights=tags[2])
        return torch.cat([self.users(user), bags, self.histories(*history)], 1).sum(1)


def test_columns_are_scored_by_rows_of_the_cache(tmp_path: Path) -> None:
    root, seen, other = str(tmp_path), columns(300, 1), columns(40, 2)
    features = sr.features.Features(
        [
            sr.features.IdFeature("user", modulo=MODULO),
            sr.features.MultiHotFeature("tags", weights="weight", modulo=MODULO),
            sr.features.SequenceFeature("history", max_len=5, modulo=MODULO),
        ]
    )
    with sr.local_cluster(shards=2) as cluster, sr.connect(cluster.address, "ads") as session:
        model = session.distribute(Net(), optimizer=sr.optim.Adagrad(lr=0.1), min_rows=1)
        for _ in range(2):
            model(**features(seen)).square().mean().backward()
            session.step()
        session.publish("ctr", root=root, model=model, features=features, example=seen)
        model.eval()
        with torch.no_grad():
            scores = [model(**features(each)) for each in (seen, other)]
    with (
        sr.local_serving("ctr", root=root, poll="50ms") as serving,
        sr.ServingClient(serving.addresses) as client,
        sr.ServedModel(client, root, device=device(), cache=KEPT) as served,
    ):
        for _ in range(2):
            for given, expected in zip((seen, other), scores, strict=True):
                torch.testing.assert_close(served(given).cpu(), expected, rtol=1e-5, atol=1e-6)
        before = served.stats()
        COUNTS.reset()
        torch.testing.assert_close(served(other).cpu(), scores[1], rtol=1e-5, atol=1e-6)
        assert served.stats().cache_hits > before.cache_hits
        assert served.stats().cache_misses == before.cache_misses
        assert COUNTS.to_device == 1, COUNTS.log
        nobody: dict[str, list[Any]] = {"user": ["nobody"], "tags": [[]], "weight": [[]], "history": [None]}
        assert served(nobody).shape == (1,)


def test_newer_dense_weights_read_the_rows_that_are_kept(tmp_path: Path) -> None:
    root, later = str(tmp_path / "models"), tmp_path / "later"
    scores = []
    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, "ads") as session:
        model = session.distribute(Scorer(), optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
        session.publish("ctr", root=root, model=model, example=batch(0))
        for _ in range(2):
            with torch.no_grad():
                scores.append(model.eval()(*batch(0)))
                model.tower[2].weight.mul_(2.0)
                model.tower[2].bias.add_(1.0)
        with torch.no_grad():
            model.tower[2].weight.mul_(0.5)
            model.tower[2].bias.sub_(1.0)
        assert sr.DensePublisher(session, "ctr", root=root, model=model, every_sec=1e-9).step() is not None
    dense = tmp_path / "models" / "ctr" / "v000001" / "dense"
    dense.rename(later)
    with (
        sr.local_serving("ctr", root=root, poll="50ms") as serving,
        sr.ServingClient(serving.addresses) as client,
        sr.ServedModel(client, root, device=device(), cache=KEPT, refresh_sec=None) as served,
    ):
        torch.testing.assert_close(served(*batch(0)).cpu(), scores[0], rtol=1e-5, atol=1e-6)
        misses = served.stats().cache_misses
        later.rename(dense)
        assert (served.refresh(), served.dense_version) == (1, 1)
        assert not torch.allclose(scores[0], scores[1], rtol=1e-2)
        for _ in range(2):
            torch.testing.assert_close(served(*batch(0)).cpu(), scores[1], rtol=1e-5, atol=1e-6)
        assert served.stats().cache_misses == misses, "the rows of the version are those that were kept"
