"""Whether a rewritten graph gives what the original gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

TOLERANCE = 1e-6  # of the largest value of an output, or of 1


def largest_gap(source: fx.GraphModule, rewritten: fx.GraphModule, inputs: Sequence[Any]) -> tuple[int, float] | None:
    """The first output, with its largest difference, that is further than TOLERANCE from the source's; None: there is
    none."""
    with torch.no_grad():
        wanted, found = pytree.tree_leaves(source(*inputs)), pytree.tree_leaves(rewritten(*inputs))
    for number, (want, have) in enumerate(zip(wanted, found, strict=True)):
        if not isinstance(want, Tensor) or not want.numel():
            continue
        gap = float((want.double() - have.double()).abs().max())
        if not gap <= TOLERANCE * max(1.0, float(want.abs().max())):
            return number, gap
    return None
