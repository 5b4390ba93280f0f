"""A small model in plain torch, for the examples with the training loops of other libraries."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from .foreign_clicks import COLUMNS, VALUES


class ClickModel(nn.Module):
    """A click model with one embedding per column and an MLP over all of them, in the form that Hugging Face's Trainer
    needs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: nn.Embedding(VALUES, 4) for name in COLUMNS})
        self.tower = nn.Sequential(nn.Linear(4 * len(COLUMNS), 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Returns the logits (n) of ids (n, columns) int64, and with labels (n) float32 the mean loss."""
        parts = [self.tables[name](ids[:, index]) for index, name in enumerate(COLUMNS)]
        logits = self.tower(torch.cat(parts, dim=1)).squeeze(1)
        if labels is None:
            return {"logits": logits}
        return {"loss": binary_cross_entropy_with_logits(logits, labels), "logits": logits}
