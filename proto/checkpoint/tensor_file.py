"""Writes and reads the safetensors format: an 8-byte length, a JSON header, then the tensors one after the other.

This module does not use the safetensors library, because servers have no torch, and numpy has no bfloat16. The library
reads the files that it writes (tests/unit/worker/checkpoint/test_checkpoint_files.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..documents import parse_json
from ..errors import DataLoss
from .folder import Piece, bytes_of
from .local_file import Pace, hash_pieces

# Maps a dtype of safetensors to numpy's. numpy has no bfloat16, so the values are kept as their bits.
DTYPES: dict[str, str] = {
    "BOOL": "|b1",
    "U8": "|u1",
    "I8": "|i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
    "F16": "<f2",
    "BF16": "<u2",
    "F32": "<f4",
    "F64": "<f8",
}
MOST_HEADER_BYTES = 100_000_000  # the bound of the safetensors library
_CHECKSUM = "sparserow.xxh3"


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file: its safetensors dtype, and its values in the numpy dtype that represents it."""

    dtype: str
    values: NDArray[Any]


@dataclass(frozen=True)
class Encoded:
    """The contents of a file that is to be written.

    Attributes:
        pieces: the buffers of the file, in order.
        size: the size of the file, in bytes.
    """

    pieces: list[Piece]
    size: int

    @property
    def xxh3(self) -> str:
        """The XXH3-64 of all bytes, in hexadecimal digits; it takes a pass over them, which ``Folder.write`` saves."""
        return hash_pieces([np.frombuffer(bytes_of(piece), np.uint8) for piece in self.pieces])


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], pace: Pace | None = None) -> Encoded:
    """Returns a file with these tensors; the checksum of their bytes is added to the metadata.

    Args:
        tensors: the tensors by name, in the order of the file.
        metadata: texts by name.
        pace: slows the hashing; None: nothing does.
    """
    offset, entries = 0, {}
    for name, tensor in tensors.items():
        size = tensor.values.nbytes
        entries[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.values.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    digest = hash_pieces([np.frombuffer(bytes_of(tensor.values), np.uint8) for tensor in tensors.values()], pace)
    header = {"__metadata__": {**metadata, _CHECKSUM: digest}, **entries}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the padding lets the tensors begin at a multiple of 8
    head = len(text).to_bytes(8, "little") + text
    return Encoded([head, *(tensor.values for tensor in tensors.values())], len(head) + offset)


def decode(data: memoryview, name: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Returns the metadata and the tensors of a file; the tensors are views of ``data``.

    Args:
        data: the bytes of the file.
        name: the name of the file, which error messages have.

    Raises:
        DataLoss: the file is cut short or is not a safetensors file; the text names it.
    """
    try:
        length = int.from_bytes(data[:8], "little")
        if len(data) < 8 or length > len(data) - 8:
            raise ValueError(f"its header ends beyond its {len(data)} bytes")
        header = parse_json(data[8 : 8 + length], name, MOST_HEADER_BYTES)
        metadata: dict[str, str] = header.pop("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata is not all text")
        body = data[8 + length :]
        tensors: dict[str, Tensor] = {}
        for tensor, entry in header.items():
            begin, end = entry["data_offsets"]
            if not all(type(size) is int and size >= 0 for size in (begin, end, *entry["shape"])):
                raise ValueError(f"tensor {tensor} has a size that is no integer >= 0")
            dtype = np.dtype(DTYPES[entry["dtype"]])
            if not 0 <= begin <= end <= len(body) or end - begin != math.prod(entry["shape"]) * dtype.itemsize:
                raise ValueError(f"tensor {tensor} lies beyond the end of the file")
            values = np.frombuffer(body[begin:end], dtype).reshape(entry["shape"])
            tensors[tensor] = Tensor(entry["dtype"], values)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DataLoss(f"{name}: is damaged, or is not a safetensors file: {error}") from None
    return metadata, tensors


def check_sum(metadata: Mapping[str, str], tensors: Sequence[Tensor], name: str) -> None:
    """Compares tensors, in their order, with the checksum in the metadata of their file.

    Raises:
        DataLoss: the checksums differ; the text names the file.
    """
    digest = hash_pieces([np.frombuffer(bytes_of(tensor.values), np.uint8) for tensor in tensors])
    if metadata.get(_CHECKSUM) != digest:
        raise DataLoss(f"{name}: the tensors do not match the checksum in the header")
