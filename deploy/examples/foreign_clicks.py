"""A small click log for the examples with other libraries: columns of ids, and a label for each sample.

Each id has a planted logit, and the label of a sample is drawn from the sum of its ids' logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...worker.metrics.binary import auc

COLUMNS = ("user", "item", "shop", "city")
VALUES = 300  # number of ids of a column; they start at 0
SAMPLES, TEST_SAMPLES, BATCH = 12_800, 4_000, 256
_PLANTED_STD = 0.7


@dataclass(frozen=True)
class Clicks:
    """Samples of the click log.

    Attributes:
        ids: (n, columns) int64.
        labels: (n) float32, 0 or 1.
    """

    ids: torch.Tensor
    labels: torch.Tensor

    def column(self, name: str) -> torch.Tensor:
        """Returns the ids of a column, (n) int64."""
        return self.ids[:, COLUMNS.index(name)]

    def auc(self, scores: torch.Tensor) -> float:
        """Returns the AUC of ``scores`` (n), which should be higher for a click."""
        return auc(scores.detach().flatten().double().numpy(), self.labels.numpy())


def clicks(samples: int = SAMPLES, *, seed: int = 1) -> Clicks:
    """Draws samples; the planted logits are the same for each seed."""
    planted = torch.Generator().manual_seed(20)
    logits = torch.randn(len(COLUMNS), VALUES, generator=planted) * _PLANTED_STD
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(VALUES, (samples, len(COLUMNS)), generator=draw)
    of_samples = logits[torch.arange(len(COLUMNS)), ids].sum(dim=1)
    return Clicks(ids, torch.bernoulli(torch.sigmoid(of_samples), generator=draw))


def held_out_clicks() -> Clicks:
    """Returns samples that no example trains on."""
    return clicks(TEST_SAMPLES, seed=2)
