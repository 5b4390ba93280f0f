"""A small model of plain torch for the examples of other libraries' loops."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from .foreign_clicks import COLUMNS, VALUES


class ClickModel(nn.Module):
    """One embedding a column, and an MLP over all of them; returns what Hugging Face's Trainer asks of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: nn.Embedding(VALUES, 4) for name in COLUMNS})
        self.tower = nn.Sequential(nn.Linear(4 * len(COLUMNS), 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Logits (n) of ids (n, columns), and with labels (n) the mean loss."""
        parts = [self.tables[name](ids[:, index]) for index, name in enumerate(COLUMNS)]
        logits = self.tower(torch.cat(parts, dim=1)).squeeze(1)
        if labels is None:
            return {"logits": logits}
        return {"loss": binary_cross_entropy_with_logits(logits, labels), "logits": logits}
