"""Checks that a rewritten graph computes the same outputs as the original."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

TOLERANCE = 1e-6  # relative to the largest absolute value of an output, or to 1 when that is larger


def largest_gap(source: fx.GraphModule, rewritten: fx.GraphModule, inputs: Sequence[Any]) -> tuple[int, float] | None:
    """Compares the outputs of two graphs on the same inputs.

    Args:
        source: the original graph.
        rewritten: the graph that must equal it.
        inputs: the positional inputs of both.

    Returns:
        The number of the first output that differs by more than TOLERANCE, and its largest absolute difference. None
        when every output agrees.
    """
    with torch.no_grad():
        wanted, found = pytree.tree_leaves(source(*inputs)), pytree.tree_leaves(rewritten(*inputs))
    for number, (want, have) in enumerate(zip(wanted, found, strict=True)):
        if not isinstance(want, Tensor) or not want.numel():
            continue
        gap = float((want.double() - have.double()).abs().max())
        if not gap <= TOLERANCE * max(1.0, float(want.abs().max())):
            return number, gap
    return None
