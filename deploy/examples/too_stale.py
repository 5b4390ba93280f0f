"""Shows where learning rate times staleness matters: a bound of 2 is harmless, a far too large one is not.

The planted log has 32 keys: a sample has one key, and its label is drawn from the logistic of the key's planted logit.
One worker trains a logistic model (a table of dim 1) with SGD on it. A row cache keeps a row for ``k`` steps, whatever
the worker itself commits meanwhile. Keys do not share samples, so each key oscillates for itself, which lowers the AUC.

Why it breaks: near its optimum a row moves by a (w - w*) in a step, with a = learning rate * the key's share of a batch
* p (1 - p). In the k + 1 steps that read one value it moves by (k + 1) a (w - w*), so it oscillates with growing
amplitude when (k + 1) a > 2. k = 0 is stable up to a < 2, k = 2 up to a < 0.67, and k = 32 up to a < 0.06. The learning
rate here makes a between 0.05 and 0.25.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from rich.console import Console
from rich.table import Table as Grid
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from ...proto.optim import SGD
from ...worker.api.connect import connect
from ...worker.metrics.binary import auc
from ...worker.session.row_cache import RowCache
from ..launch.local_cluster import local_cluster

_KEYS, _BATCH = 32, 512
_PLANTED_STD = 1.5
_RATE = 32.0  # times a share of 1/32 of a batch for each key, times p (1 - p) <= 1/4: a <= 0.25


class _Clicks:
    """Batches of ids (batch, 1) and labels (batch), drawn from planted logits; each pass draws the same samples."""

    def __init__(self, batches: int, *, seed: int) -> None:
        self._batches, self._seed = batches, seed
        planted = torch.Generator().manual_seed(20)
        self._logits = torch.randn(_KEYS, generator=planted) * _PLANTED_STD

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        random = torch.Generator().manual_seed(self._seed)
        for _ in range(self._batches):
            ids = torch.randint(_KEYS, (_BATCH, 1), generator=random)
            yield ids, torch.bernoulli(torch.sigmoid(self._logits[ids].sum(1)), generator=random)

    def bayes_auc(self) -> float:
        """Returns the AUC of the model that made the log."""
        scores, labels = zip(*((self._logits[ids].sum(1), labels) for ids, labels in self), strict=True)
        return auc(torch.cat(scores).numpy(), torch.cat(labels).numpy())


class _Logistic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight_of = nn.EmbeddingBag(_KEYS, 1, mode="sum")
        nn.init.zeros_(self.weight_of.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.weight_of(ids)
        return logits.squeeze(1)


def train(address: str, k: int, *, steps: int) -> float:
    """Trains with rows ``k`` steps late, and returns the test AUC.

    Args:
        address: ``HOST:PORT`` of a cluster's coordinator.
        k: the staleness of the session and of its row cache; 0 is synchronous, without a cache.
        steps: the number of batches of 512 samples.
    """
    test = _Clicks(40, seed=2)
    cache = RowCache(1 << 20, staleness=k, own_commits="bounded") if k > 0 else None
    with connect(address, namespace=f"too-stale-{k}", staleness=k, cache=cache) as session:
        model = session.distribute(_Logistic(), optimizer=SGD(lr=_RATE), min_rows=1)
        log = _Clicks(steps, seed=1)
        for ids, labels in log:
            binary_cross_entropy_with_logits(model(ids), labels).backward()
            session.step()
        session.flush()
        model.eval()
        with torch.no_grad():
            scored = [(model(ids).numpy(), labels.numpy()) for ids, labels in test]
    scores, labels_of = (np.concatenate(part) for part in zip(*scored, strict=True))
    return auc(scores, labels_of)


def compare(staleness: Sequence[int], *, steps: int) -> dict[int, float]:
    """Returns the test AUC by staleness; each run has tables of its own in one local cluster."""
    with local_cluster(shards=1) as cluster:
        return {k: train(cluster.address, k, steps=steps) for k in staleness}


def main() -> None:
    """Prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 2, 32], help="bounds to compare")
    parser.add_argument("--steps", type=int, default=1000, help="batches of 512 samples")
    asked = parser.parse_args()
    results = compare(asked.staleness, steps=asked.steps)
    grid = Grid(title=f"test AUC; the log's own model: {_Clicks(40, seed=2).bayes_auc():.4f}")
    for title in ("staleness", "test AUC"):
        grid.add_column(title, justify="right")
    for k, value in results.items():
        grid.add_row(str(k), f"{value:.4f}")
    Console().print(grid)


if __name__ == "__main__":
    main()
