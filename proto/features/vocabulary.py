"""Vocabularies: the tokens that have a key of their own, by the number of their line in a file."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import InvalidArgument

MOST_BYTES = 4 << 30


class Vocabulary:
    """The tokens of a file, one a line; the key of a token is the number of its line, from 0.

    Args:
        data: the bytes of the file, in UTF-8. A line ends with a line feed; the last one may lack it.
        name: the name of the file, for error texts.

    Raises:
        InvalidArgument: the file has no line, or a token twice; the text names the line.
    """

    def __init__(self, data: bytes, name: str) -> None:
        lines = data.split(b"\n")
        if lines and not lines[-1]:
            lines.pop()
        if not lines:
            raise InvalidArgument(f"vocabulary {name}: the file has no line")
        self.name = name
        self.data = data
        self._tokens = pa.array([line.removesuffix(b"\r") for line in lines], type=pa.large_binary())
        if len(pc.unique(self._tokens)) < len(self._tokens):
            seen: dict[bytes, int] = {}
            for number, token in enumerate(self._tokens.to_pylist(), 1):
                if token in seen:
                    shown = token.decode(errors="replace")
                    raise InvalidArgument(f"vocabulary {name}: line {number} repeats line {seen[token]}, {shown!r}")
                seen[token] = number

    def __len__(self) -> int:
        return len(self._tokens)

    def keys(self, tokens: pa.Array) -> npt.NDArray[np.int64]:
        """Returns the keys of tokens, (n) int64; -1 for one that the vocabulary does not have.

        Args:
            tokens: a large binary array.
        """
        found = pc.index_in(tokens, value_set=self._tokens)
        keys: npt.NDArray[np.int64] = pc.fill_null(found, -1).to_numpy(zero_copy_only=False).astype(np.int64)
        return keys
