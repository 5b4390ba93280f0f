"""Converts numpy arrays to tensors, also bfloat16, which numpy does not have, and names dtypes as safetensors does."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

SAFETENSORS_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}


def tensor_of(values: NDArray[Any], is_bfloat16: bool = False) -> torch.Tensor:
    """Returns a tensor of the same shape that shares the memory of the array.

    Args:
        values: the array, of any dtype that torch has; uint16 when ``is_bfloat16``.
        is_bfloat16: whether the values are the bits of bfloat16 numbers.
    """
    if is_bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)
