"""Tensors of numpy arrays, which have no bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def tensor_of(values: NDArray[Any], is_bfloat16: bool = False) -> torch.Tensor:
    """The array as a tensor of the same shape that shares its memory.

    Args:
        values: of any dtype that torch has; uint16 where ``is_bfloat16``.
        is_bfloat16: the values are the bits of bfloat16.
    """
    if is_bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
