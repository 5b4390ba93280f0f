"""Served programs on a CUDA device: the scores of the host, and rows that stay there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("sparserow.cpp_ext._client", reason="the native libraries are not built", exc_type=ImportError)
import sparserow as sr

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BATCHES = 5


class Scorer(nn.Module):
    """Three tables of rows, one of bags, ids that the program computes, and a dense tower."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(1000, 8) for _ in range(3))
        self.tags = nn.EmbeddingBag(500, 8, mode="mean")
        self.tower = nn.Sequential(nn.Linear(33, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: Tensor, tags: Tensor, age: Tensor) -> Tensor:
        hashed = torch.remainder(ids, 900)
        rows = [table(hashed[:, column]) for column, table in enumerate(self.tables)]
        found: Tensor = self.tower(torch.cat([*rows, self.tags(tags), age.unsqueeze(1)], dim=1))
        return found.squeeze(1)


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, 10**6, (64, 3), generator=made),
        torch.randint(0, 500, (64, 3), generator=made),
        torch.rand(64, generator=made),
    )


def test_scores_on_cuda_are_those_of_the_host(tmp_path: Path) -> None:
    root = str(tmp_path)
    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, "ads") as session:
        torch.manual_seed(0)
        model = sr.distribute(Scorer(), session, optimizer=sr.Adagrad(lr=0.1), min_rows=1)
        dense = torch.optim.Adam(model.parameters(), lr=0.01)
        for seed in range(4):
            model(*batch(seed)).square().mean().backward()
            session.step(dense)
        sr.publish(session, "ctr", root=root, model=model, example=batch(0))
        model.eval()
        with torch.no_grad():
            scores = [model(*batch(seed)) for seed in range(BATCHES)]
    with sr.local_serving("ctr", root=root, poll="50ms") as serving, sr.ServingClient(serving.addresses) as client:
        for kept, dtype, within in ((0, "float32", 1e-5), (1 << 16, "float32", 1e-5), (1 << 16, "bfloat16", 3e-2)):
            arguments = {"device_bytes": kept, "device_dtype": dtype} if kept else {}
            with sr.ServedModel(client, root, device="cuda", **arguments) as served:
                for _ in range(2):
                    for seed, expected in enumerate(scores):
                        out = served(*batch(seed))
                        assert out.is_cuda
                        torch.testing.assert_close(out.cpu(), expected, rtol=within, atol=within)
                stats = served.stats()
                assert (stats.device_hits > 0) == (kept > 0)
                assert stats.device_bytes <= kept
