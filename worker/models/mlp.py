"""A stack of linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(widths: Sequence[int], dropout: float = 0.0, *, activate_last: bool = False) -> nn.Sequential:
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
    return nn.Sequential(*layers)
