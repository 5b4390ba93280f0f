"""A multilayer perceptron: a stack of linear layers with activations between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Tower(nn.Sequential):
    """A sequence of layers, optionally with activation checkpointing.

    Attributes:
        is_checkpointed: whether backward computes the activations within the tower again, so that they are not kept.
    """

    is_checkpointed = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Returns the output, (B, width_out), for ``input``, (B, width_in)."""
        out: torch.Tensor
        if self.is_checkpointed and torch.is_grad_enabled():
            out = checkpoint(super().forward, input, use_reentrant=False)
        else:
            out = super().forward(input)
        return out


def mlp(
    widths: Sequence[int],
    dropout: float = 0.0,
    *,
    activate_last: bool = False,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> Tower:
    """Makes linear layers of ``widths[0] -> widths[1] -> ...`` with an activation and dropout between them.

    Args:
        widths: the input, hidden and output widths; at least 2.
        dropout: the share of units that are dropped after each activation while training.
        activate_last: whether the activation and dropout are applied to the output too.
        activation: makes the activation between two layers; the default makes ReLU.

    Raises:
        ValueError: a width or the share is not allowed.
    """
    if wrong := [width for width in widths if isinstance(width, bool) or not isinstance(width, int) or width < 1]:
        raise ValueError(f"width {wrong[0]!r} of an MLP is not allowed; allowed: an integer >= 1")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout!r} is not allowed; allowed: a number >= 0 and < 1")
    layers: list[nn.Module] = []
    last = len(widths) - 2
    for index, (width_in, width_out) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(width_in, width_out))
        if index < last or activate_last:
            layers.append(activation())
            if dropout > 0:
                layers.append(nn.Dropout(dropout))
    return Tower(*layers)
