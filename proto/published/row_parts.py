"""Writes and reads the rows of a published table as safetensors files.

A file has ``key`` uint64 (n), ``version`` uint64 (n) and the weights. These are ``row`` (n, dim), or with int8 ``code``
int8 (n, dim) and ``scale`` float32 (n): a weight is its code times the scale of its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoint.accepted import stored_as
from ..checkpoint.entries import FileFacts
from ..checkpoint.file_check import BlockReader, read_checked
from ..checkpoint.folder import Folder, Piece, bytes_of
from ..checkpoint.tensor_file import Tensor, decode, encode
from ..errors import DataLoss
from .manifest import HashedFile, Part, ServedDtype
from .proof import sha256_of

_TENSOR_DTYPES: dict[str, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

Keys = NDArray[np.uint64]
Rows = NDArray[np.float32]


def write_rows(
    folder: Folder,
    file: str,
    dtype: ServedDtype,
    keys: Keys,
    versions: NDArray[np.uint64],
    rows: Rows,
    *,
    is_signed: bool = False,
) -> Part:
    """Writes rows (n, dim) float32 as a part, converted to ``dtype`` with rounding to the nearest value.

    Args:
        folder: the folder of the version.
        file: the name of the file.
        dtype: the dtype of the published rows.
        keys, versions: (n) uint64 each.
        rows: (n, dim) float32.
        is_signed: whether the entry has the SHA-256 of the file.

    Returns:
        The entry of the file for a manifest.
    """
    tensors = {"key": Tensor("U64", keys), "version": Tensor("U64", versions), **_packed(dtype, rows)}
    encoded = encode(tensors, {"sparserow.dtype": dtype})
    sha256 = sha256_of(encoded.pieces) if is_signed else None
    return Part(file, encoded.size, folder.write(file, encoded.pieces), len(keys), sha256)


def write_tensors(folder: Folder, file: str, tensors: dict[str, Tensor]) -> HashedFile:
    """Writes a safetensors file and returns its entry for a manifest."""
    return write_file(folder, file, encode(tensors, {}).pieces)


def write_file(folder: Folder, file: str, pieces: Sequence[Piece]) -> HashedFile:
    """Writes a file and returns its entry for a manifest.

    Args:
        folder: the folder of the version.
        file: the name of the file.
        pieces: the contents, written one after another.
    """
    size = sum(len(bytes_of(piece)) for piece in pieces)
    return HashedFile(file, size, folder.write(file, pieces), sha256_of(pieces))


def read_file(folder: Folder, facts: FileFacts, reader: BlockReader | None = None) -> memoryview:
    """Returns the bytes of a file, after comparing them with its entry in the manifest.

    Bytes whose SHA-256 was compared are in memory of this process, where a later change of the file does not reach.

    Args:
        folder: the folder of the version.
        facts: the file's entry in the manifest.
        reader: as in :func:`~..checkpoint.file_check.read_checked`.

    Raises:
        DataLoss: the size, the checksum or the SHA-256 differs; the text names the file.
        NotFound: the file is missing.
    """
    data = read_checked(folder, facts, "the file does not match its checksum", reader)
    sha256 = facts.sha256 if isinstance(facts, HashedFile | Part) else None
    if sha256 is None:
        return data
    if isinstance(data.obj, np.memmap):
        data = memoryview(bytes(data))
    if sha256_of([data]) != sha256:
        raise DataLoss(f"{folder.url}/{facts.file}: the file does not match its SHA-256")
    return data


def read_tensors(folder: Folder, facts: FileFacts, reader: BlockReader | None = None) -> dict[str, NDArray[Any]]:
    """Returns the tensors of a file by name, after comparing its size and checksum."""
    _, tensors = decode(read_file(folder, facts, reader), f"{folder.url}/{facts.file}")
    return {name: tensor.values for name, tensor in tensors.items()}


def read_rows(
    folder: Folder, part: Part, dtype: ServedDtype, dim: int, reader: BlockReader | None = None
) -> tuple[Keys, NDArray[np.uint64], NDArray[Any]]:
    """Returns keys (n), versions (n) and rows (n, dim) of a part.

    The rows are as stored: float32, float16, or uint16 with the bits of bfloat16. Those of int8 are float32.

    Raises:
        DataLoss: the part is damaged, or differs from its manifest; the text names the file.
    """
    tensors = read_tensors(folder, part, reader)
    try:
        rows = _unpacked(dtype, tensors)
        keys, versions = tensors["key"], tensors["version"]
    except KeyError as error:
        raise DataLoss(f"{folder.url}/{part.file}: the file has no tensor {error}") from None
    except (ValueError, IndexError) as error:
        raise DataLoss(f"{folder.url}/{part.file}: its tensors do not have matching shapes: {error}") from None
    if keys.dtype != np.uint64 or versions.dtype != np.uint64:
        raise DataLoss(f"{folder.url}/{part.file}: its keys and versions are not uint64")
    if keys.shape != (part.rows,) or versions.shape != keys.shape or rows.shape != (part.rows, dim):
        raise DataLoss(f"{folder.url}/{part.file}: its tensors do not fit ({part.rows}, {dim}) rows")
    return keys, versions, rows


def _packed(dtype: ServedDtype, rows: Rows) -> dict[str, Tensor]:
    if dtype == "int8":
        scale = np.abs(rows).max(axis=1, initial=0.0) / np.float32(127)
        with np.errstate(divide="ignore", invalid="ignore"):
            code = np.where(scale[:, None] > 0, np.rint(rows / scale[:, None]), 0)
        return {"code": Tensor("I8", np.clip(code, -127, 127).astype(np.int8)), "scale": Tensor("F32", scale)}
    return {"row": Tensor(_TENSOR_DTYPES[dtype], stored_as(rows, dtype))}


def _unpacked(dtype: ServedDtype, tensors: dict[str, NDArray[Any]]) -> NDArray[Any]:
    if dtype == "int8":
        return np.asarray(tensors["code"].astype(np.float32) * tensors["scale"][:, None], np.float32)
    stored: dict[str, type] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
    rows = tensors["row"]
    if rows.dtype != stored[dtype]:
        raise ValueError(f"rows of dtype {rows.dtype} in place of {dtype}")
    return np.ascontiguousarray(rows)
