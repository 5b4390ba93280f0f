"""A stack of linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Tower(nn.Sequential):
    """Layers one after the other. With ``is_checkpointed`` backward computes them again; nothing between is kept."""

    is_checkpointed = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """input: (B, width_in) -> (B, width_out)."""
        out: torch.Tensor
        if self.is_checkpointed and torch.is_grad_enabled():
            out = checkpoint(super().forward, input, use_reentrant=False)
        else:
            out = super().forward(input)
        return out


def mlp(widths: Sequence[int], dropout: float = 0.0, *, activate_last: bool = False) -> Tower:
    """Linear layers of ``widths[0] -> widths[1] -> ...`` with ReLU and dropout between them.

    Args:
        widths: input, hidden and output widths; at least 2.
        dropout: share of units dropped after each ReLU while training.
        activate_last: whether the output passes ReLU (and dropout) too.
    """
    layers: list[nn.Module] = []
    last = len(widths) - 2
    for index, (width_in, width_out) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(width_in, width_out))
        if index < last or activate_last:
            layers.append(nn.ReLU())
            if dropout > 0:
                layers.append(nn.Dropout(dropout))
    return Tower(*layers)
