"""What a reader yields."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """Samples of one step on one worker. B may be 0: every rank yields the same number of batches.

    Attributes:
        dense: (B, n_dense) float32, transformed numeric features.
        sparse: (B, n_sparse) int64, one 63-bit key a column.
        labels: (B) float32, 0 or 1.
    """

    dense: torch.Tensor
    sparse: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def to(self, device: torch.device) -> Batch:
        """The same batch on ``device``; itself when it is there already."""
        return Batch(self.dense.to(device), self.sparse.to(device), self.labels.to(device))
