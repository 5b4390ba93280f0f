"""A model of rows, bags and ids that it computes, trained and published, for tests of served programs on devices."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import sparserow as sr


class Scorer(nn.Module):
    """Three tables of rows, one of bags, ids that the program computes, and a dense tower."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(1000, 4) for _ in range(3))
        self.tags = nn.EmbeddingBag(500, 4, mode="mean")
        self.tower = nn.Sequential(nn.Linear(17, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids: Tensor, tags: Tensor, age: Tensor) -> Tensor:
        hashed = torch.remainder(ids, 900)
        rows = [table(hashed[:, column]) for column, table in enumerate(self.tables)]
        found: Tensor = self.tower(torch.cat([*rows, self.tags(tags), age.unsqueeze(1)], dim=1))
        return found.squeeze(1)


def batch(seed: int, rows: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, 10**6, (rows, 3), generator=made),
        torch.randint(0, 500, (rows, 3), generator=made),
        torch.rand(rows, generator=made),
    )


def publish_scorer(root: str, batches: int, rows: int = 16) -> list[Tensor]:
    """Trains a scorer, publishes it as ``ctr`` of namespace ``ads``, and returns its scores for batches 0, 1, ...

    Args:
        root: the folder of the registry.
        batches: the number of batches that are scored.
        rows: of a batch.
    """
    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, "ads") as session:
        torch.manual_seed(0)
        model = session.distribute(Scorer(), optimizer=sr.optim.Adagrad(lr=0.1), min_rows=1)
        dense = torch.optim.Adam(model.parameters(), lr=0.01)
        for seed in range(4):
            model(*batch(seed, rows)).square().mean().backward()
            session.step(dense)
        session.publish("ctr", root=root, model=model, example=batch(0, rows))
        model.eval()
        with torch.no_grad():
            scores = [model(*batch(seed, rows)) for seed in range(batches)]
    return scores
