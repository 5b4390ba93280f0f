"""Vocabularies: the tokens that have a key of their own, which the number of their line in a file gives."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from xxhash import xxh3_64

from ..errors import InvalidArgument
from ..row_keys import TextHasher
from .cells import hashed_texts

MOST_BYTES = 4 << 30
_MOST_LINES = (1 << 31) - 1


class Vocabulary:
    """The tokens of a file, one a line.

    The tokens are hashed once, which takes 12 bytes a line besides them. A call hashes its own tokens and searches.

    Args:
        data: the bytes of the file, in UTF-8. A line ends with a line feed; the last one may lack it.
        name: the name of the file, for error texts.
        hasher: makes numbers of texts, by which they are found; it may give several texts one number.

    Attributes:
        name: the argument of that name.
        data: the argument of that name.

    Raises:
        InvalidArgument: the file has no line, too many, or a token twice; the text names the line.
    """

    def __init__(self, data: bytes, name: str, hasher: TextHasher) -> None:
        self.name, self.data, self._hasher = name, data, hasher
        text = data.replace(b"\r\n", b"\n").removesuffix(b"\n" if data.endswith(b"\n") else b"\r")
        if not data:
            raise InvalidArgument(f"vocabulary {name}: the file has no line")
        if (lines := text.count(b"\n") + 1) > _MOST_LINES:
            raise InvalidArgument(f"vocabulary {name}: the file has {lines} lines; allowed: at most {_MOST_LINES}")
        self._tokens = pc.split_pattern(pa.array([text], pa.large_binary()), b"\n").values
        hashes = hashed_texts(self._tokens, hasher)
        order = np.argsort(hashes, kind="stable")
        self._lines, self._hashes = order.astype(np.int32), hashes[order]
        self._shared = self._of_one_hash()

    def _of_one_hash(self) -> dict[bytes, int]:
        """Returns the lines of the tokens whose hash is that of another token, by token."""
        is_next = self._hashes[1:] == self._hashes[:-1]
        places = np.flatnonzero(np.append(is_next, False) | np.append(False, is_next))
        found: dict[bytes, int] = {}
        for line in np.sort(self._lines[places]).tolist():
            token = self._tokens[line].as_py()
            if token in found:
                shown = token.decode(errors="replace")
                raise InvalidArgument(
                    f"vocabulary {self.name}: line {line + 1} repeats line {found[token] + 1}, {shown!r}"
                )
            found[token] = line
        return found

    def __len__(self) -> int:
        return len(self._tokens)

    def digest(self, lines: int | None = None) -> str:
        """Returns the XXH3-64 digest of the first ``lines`` tokens in hexadecimal digits; None: of all."""
        tokens = self._tokens if lines is None else self._tokens.slice(0, lines)
        _, offsets, texts = tokens.buffers()
        ends = np.frombuffer(offsets, np.int64)[tokens.offset : tokens.offset + len(tokens) + 1]
        digest = xxh3_64((ends - ends[0]).tobytes())
        digest.update(memoryview(texts)[int(ends[0]) : int(ends[-1])])
        return digest.hexdigest()

    def lines(self, tokens: pa.Array) -> npt.NDArray[np.int64]:
        """Returns the numbers of the lines of tokens, (n) int64 from 0; -1 for one that the vocabulary does not have.

        Args:
            tokens: a large binary array without nulls.
        """
        hashes = hashed_texts(tokens, self._hasher)
        places = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        lines = self._lines[places]
        is_same = pc.equal(self._tokens.take(pa.array(lines)), tokens).to_numpy(zero_copy_only=False)
        found: npt.NDArray[np.int64] = np.where(is_same, lines, -1).astype(np.int64)
        if self._shared:
            for at in np.flatnonzero(~is_same & (self._hashes[places] == hashes)):
                found[at] = self._shared.get(tokens[int(at)].as_py(), -1)
        return found
