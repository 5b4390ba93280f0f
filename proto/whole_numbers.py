"""Keys of rows as users write them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidArgument


def whole_numbers(keys: Any) -> NDArray[Any]:
    """Keys as an array; numpy makes floats of a list in which some integers have 64 bits and some have a sign."""
    array = np.asarray(keys) if len(keys) else np.empty(0, np.uint64)
    if array.dtype.kind not in "iu" and not isinstance(keys, np.ndarray) and all(isinstance(key, int) for key in keys):
        try:
            array = np.array(keys, dtype=np.uint64)
        except OverflowError:
            bad = next(key for key in keys if not 0 <= key < 2**64)
            raise InvalidArgument(f"keys: {bad} is not allowed; allowed: [0, 2**64)") from None
    return array
