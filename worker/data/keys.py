"""How a string becomes a key: one hash, the same in every reader, model and server.

``key = xxh3_64(bytes, seed=0) >> 1``, a 63-bit non-negative integer, so that it fits a torch int64 id. The bytes are
the field's own, after the reader's trimming. Each column has its own table, so columns do not share keys. A missing
value is the empty string, a key like any other.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

Keys = npt.NDArray[np.int64]


def key_of(token: str | bytes) -> int:
    """The 63-bit key of one token (a ``str`` is encoded as UTF-8)."""
    return xxh3_64_intdigest(token.encode() if isinstance(token, str) else token) >> 1


def keys_of(tokens: Iterable[bytes]) -> Keys:
    """The keys of tokens: (n) int64, non-negative, in their order."""
    return np.fromiter((xxh3_64_intdigest(token) >> 1 for token in tokens), dtype=np.int64)
