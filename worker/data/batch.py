"""The batches that a reader of click logs yields."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """The samples of one step on one worker. B may be 0, as every rank yields the same number of batches.

    Attributes:
        dense: the transformed numeric features, (B, n_dense) float32.
        sparse: the keys, one of 63 bits for each column, (B, n_sparse) int64.
        labels: the labels, 0 or 1, (B) float32.
    """

    dense: torch.Tensor
    sparse: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def to(self, device: torch.device) -> Batch:
        """Returns the batch on ``device``; tensors that are there already are not copied."""
        return Batch(self.dense.to(device), self.sparse.to(device), self.labels.to(device))
