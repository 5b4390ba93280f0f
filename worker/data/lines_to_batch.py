"""Makes a batch of decoded lines."""

from __future__ import annotations

import torch

from .batch import Batch
from .decoded import Lines
from .features import FittedFeatures


def batch_of(features: FittedFeatures, lines: Lines) -> Batch:
    """Returns the samples of lines as the tensors that a model reads.

    Args:
        features: the transforms, with their statistics.
        lines: the lines.
    """
    return Batch(
        torch.from_numpy(features.dense(lines)),
        torch.from_numpy(features.sparse(lines)),
        torch.from_numpy(lines.labels),
        tuple(tuple(torch.from_numpy(part) for part in lists.parts) for lists in lines.lists),
        None if lines.weights is None else torch.from_numpy(lines.weights),
        None if lines.groups is None else torch.from_numpy(lines.groups),
        features.spec.names,
        None if lines.times is None else torch.from_numpy(lines.times),
    )
