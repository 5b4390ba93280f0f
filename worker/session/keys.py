"""Keys of rows: what users give, as uint64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...cpp_ext import _client
from ...proto.errors import InvalidArgument
from ...proto.whole_numbers import whole_numbers

KeyArray: TypeAlias = NDArray[np.uint64]
Keys: TypeAlias = "NDArray[np.integer] | Sequence[int] | Sequence[str] | Sequence[bytes]"


def hash_key(value: str | bytes | tuple[str | bytes, ...]) -> int:
    """The 63-bit key of a string or a composite, the same in every process and language.

    xxh3_64 of the bytes (UTF-8 of a string), shifted right by one so that it fits a torch id. A composite's bytes
    are each part's length (uint32, little-endian) and bytes.

    Returns:
        A key in [0, 2**63).
    """
    if isinstance(value, tuple):
        parts = [part.encode() if isinstance(part, str) else part for part in value]
        return _client.key_of_bytes(b"".join(len(part).to_bytes(4, "little") + part for part in parts))
    return _client.key_of_bytes(value.encode() if isinstance(value, str) else value)


def as_keys(keys: Keys) -> KeyArray:
    """Keys as (n) uint64: integers as they are, strings hashed by :func:`hash_key`.

    Raises:
        InvalidArgument: a single string, not one-dimensional, not integers, or negative (names the first one).
    """
    if isinstance(keys, str | bytes):
        raise InvalidArgument(f"keys: {keys!r} is not allowed; allowed: (n) integers or strings, such as [{keys!r}]")
    if not isinstance(keys, np.ndarray) and len(keys) > 0 and isinstance(keys[0], str | bytes):
        return np.fromiter((hash_key(key) for key in keys), dtype=np.uint64, count=len(keys))  # type: ignore[arg-type]
    array = whole_numbers(keys)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidArgument(
            f"keys: dtype {array.dtype} of shape {array.shape} is not allowed; allowed: (n) integers or strings"
        )
    if array.dtype.kind == "i" and bool((array < 0).any()):
        raise InvalidArgument(f"keys: {int(array[array < 0][0])} is not allowed; allowed: [0, 2**64)")
    return np.ascontiguousarray(array, dtype=np.uint64)
