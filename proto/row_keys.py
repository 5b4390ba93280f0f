"""Makes the integer keys of rows from what users and readers give.

The key of a string is ``xxh3_64(bytes, seed=0) >> 1``. It has 63 bits, so that it fits a torch int64 id. Every reader,
table and serving client computes it with this module.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from .errors import InvalidArgument, not_allowed

KeyArray: TypeAlias = NDArray[np.uint64]
TextHasher: TypeAlias = Callable[[NDArray[np.int64], Any], NDArray[np.int64]]
_TEXT = (str, bytes)
Keys: TypeAlias = "NDArray[np.integer[Any]] | Sequence[int] | Sequence[str] | Sequence[bytes]"


def hash_key(value: str | bytes | tuple[str | bytes, ...]) -> int:
    """Returns the key of a string or a composite, the same in every process and language.

    The key is xxh3_64 of the bytes (UTF-8 of a string), shifted right by one so that it fits a torch id. The bytes of a
    composite are, for each part, its length (uint32, little-endian) and its bytes.

    Returns:
        A key in [0, 2**63).
    """
    if isinstance(value, tuple):
        parts = [part.encode() if isinstance(part, str) else part for part in value]
        value = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return xxh3_64_intdigest(value.encode() if isinstance(value, str) else value) >> 1


def hash_keys(tokens: Iterable[bytes]) -> NDArray[np.int64]:
    """Returns the keys of tokens, (n) non-negative int64 in their order; each is :func:`hash_key` of its token."""
    return np.fromiter((xxh3_64_intdigest(token) >> 1 for token in tokens), dtype=np.int64)


def hash_texts(offsets: NDArray[np.int64], texts: Any) -> NDArray[np.int64]:
    """Returns the keys of texts that lie one after another, (n) int64; each is :func:`hash_key` of its text.

    A process with the native library has a faster function of the same arguments, ``_client.text_keys``.

    Args:
        offsets: where each text begins in ``texts``, and the end of the last one, (n + 1) int64.
        texts: the bytes of the texts, as a buffer.
    """
    data, places = memoryview(texts), offsets.tolist()
    return hash_keys(bytes(data[begin:end]) for begin, end in itertools.pairwise(places))


def as_keys(keys: Keys) -> KeyArray:
    """Returns keys as (n) uint64: integers as they are, and strings hashed by :func:`hash_key`.

    Raises:
        InvalidArgument: ``keys`` is a single string, is no sequence, is not one-dimensional, has strings beside other
            values, or has a value that is no integer in [0, 2**64).
    """
    if isinstance(keys, str | bytes):
        raise not_allowed("keys", keys, f"(n) integers or strings, such as [{keys!r}]")
    if not isinstance(keys, np.ndarray):
        texts = _texts(keys)
        if texts:
            return np.fromiter(map(hash_key, texts), dtype=np.uint64, count=len(texts))
    array = keys if isinstance(keys, np.ndarray) and keys.ndim == 0 else _integers(keys)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidArgument(
            f"keys: dtype {array.dtype} of shape {array.shape} is not allowed; "
            "allowed: (n) integers in [0, 2**64) or strings"
        )
    if array.dtype.kind == "i" and bool((array < 0).any()):
        raise not_allowed("keys", int(array[array < 0][0]), "[0, 2**64)")
    return np.ascontiguousarray(array, dtype=np.uint64)


def _texts(keys: Any) -> list[str | bytes]:
    """Returns the keys that are strings: all of them, or none."""
    try:
        texts = [key for key in keys if isinstance(key, _TEXT)] if len(keys) and isinstance(keys[0], _TEXT) else []
    except (TypeError, KeyError):
        raise not_allowed("keys: type", type(keys).__name__, "a sequence of (n) integers or strings") from None
    if texts and len(texts) < len(keys):
        other = next(key for key in keys if not isinstance(key, _TEXT))
        raise not_allowed("keys", other, "strings alone, as the first key is one")
    return texts


def _integers(keys: Any) -> NDArray[Any]:
    """Returns keys as an array; numpy would make floats of integers of which some need 64 bits and some have a sign."""
    try:
        array = np.asarray(keys) if len(keys) else np.empty(0, np.uint64)
    except ValueError:  # lists of several lengths
        text = "keys: lists of several lengths are not allowed; allowed: (n) integers or strings"
        raise InvalidArgument(text) from None
    if array.dtype.kind not in "iu" and not isinstance(keys, np.ndarray) and all(isinstance(key, int) for key in keys):
        try:
            array = np.array(keys, dtype=np.uint64)
        except OverflowError:
            bad = next(key for key in keys if not 0 <= key < 2**64)
            raise not_allowed("keys", bad, "[0, 2**64)") from None
    return array
