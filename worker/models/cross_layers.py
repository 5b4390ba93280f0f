"""Cross layers, which multiply the features of an input with each other.

DCN is Wang et al., "Deep & Cross Network for Ad Click Predictions" (ADKDD 2017). DCN-v2 is Wang et al., "DCN V2:
Improved Deep & Cross Network and Practical Lessons for Web-scale Learning to Rank Systems" (WWW 2021).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class VectorCross(nn.Module):
    """The cross layer of DCN: ``x0 (w . x) + b + x`` with a vector w. Inputs and output are (B, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Linear(width, 1, bias=False)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """Returns the next x, (B, width)."""
        crossed: Tensor = x0 * self.weight(x) + self.bias + x
        return crossed


class MatrixCross(nn.Module):
    """The cross layer of DCN-v2: ``x0 * (W x + b) + x`` (equation 1). Inputs and output are (B, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Linear(width, width)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """Returns the next x, (B, width)."""
        crossed: Tensor = x0 * self.weight(x) + x
        return crossed


class MixtureCross(nn.Module):
    """The mixture of low-rank cross layers of DCN-v2: ``sum over i of G_i(x) E_i(x) + x``.

    An expert is ``E_i(x) = x0 * (U_i tanh(C_i tanh(V_i x)) + b)``; the gate is ``G(x) = softmax(W x)``.

    Args:
        width: the width of the input.
        rank: the rank of an expert.
        experts: the number of experts.
    """

    def __init__(self, width: int, rank: int, experts: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(experts))
        self.between = nn.ModuleList(nn.Linear(rank, rank, bias=False) for _ in range(experts))
        self.up = nn.ModuleList(nn.Linear(rank, width, bias=False) for _ in range(experts))
        self.bias = nn.Parameter(torch.zeros(width))
        self.gate = nn.Linear(width, experts, bias=False)

    def forward(self, x0: Tensor, x: Tensor) -> Tensor:
        """Returns the next x, (B, width)."""
        gates = torch.softmax(self.gate(x), dim=1)
        crossed = x
        for index, (down, between, up) in enumerate(zip(self.down, self.between, self.up, strict=True)):
            expert = x0 * (up(torch.tanh(between(torch.tanh(down(x))))) + self.bias)
            crossed = crossed + gates[:, index, None] * expert
        return crossed
