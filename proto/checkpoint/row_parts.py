"""The safetensors files of rows, which a shard writes and any shard or program reads.

A file has these tensors with n rows each:

- ``key`` uint64, and ``weight`` (n, dim) in the dtype of the table;
- ``state`` (n, floats of the optimizer) float32;
- ``version`` uint64 (lineage << 48 | the slot's sequence), and ``update_count`` uint32;
- ``age_steps`` uint32, the steps between the last push to the row and the cut, where the table's policy needs it;
- ``push_seconds`` uint32, the unix time of that push, where the table's policy needs it.

A file of one table names the table in its metadata (format 1). Small tables share a file (format 2): there the names of
tensors begin with ``TABLE_ID.``, and ``sparserow.tables`` lists the tables as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..documents import parse_json
from ..errors import DataLoss
from ..schema import Dtype
from .local_file import Pace
from .tensor_file import MOST_HEADER_BYTES, Encoded, Tensor, check_sum, decode, encode

FORMAT, SHARED_FORMAT = "1", "2"
_PREFIX = "sparserow."
_AGES = ("age_steps", "push_seconds")
_DTYPES: dict[Dtype, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True)
class PartFacts:
    """The facts in the header of a part: the table, the slots and the cluster of its rows.

    Attributes:
        cluster_id: the id of the cluster that wrote the part.
        table: the full name ``namespace/name``.
        table_id: the hash of the full name.
        dtype: the dtype of the stored weights.
        slot_count: the number of slots of the cluster.
        first_slot, end_slot: the range [first_slot, end_slot) of slots that has the rows; its first and last slot have
            rows. Rows that changed while the checkpoint was written may be in another file than the other rows of their
            slots.
    """

    cluster_id: int
    table: str
    table_id: int
    dtype: Dtype
    slot_count: int
    first_slot: int
    end_slot: int


@dataclass(frozen=True)
class Rows:
    """Rows of one table, by column.

    Attributes:
        keys, versions, update_counts: (n) each.
        weights: (n, dim) in the dtype of the table.
        state: (n, floats of the optimizer) float32.
        age_steps, push_seconds: (n) each for policies that need them, otherwise (0).
    """

    keys: NDArray[np.uint64]
    versions: NDArray[np.uint64]
    update_counts: NDArray[np.uint32]
    weights: NDArray[Any]
    state: NDArray[np.float32]
    age_steps: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    push_seconds: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))

    @property
    def size(self) -> int:
        """The size of all columns, in bytes."""
        return sum(column.nbytes for column in vars(self).values())

    def copy(self) -> Rows:
        """Returns a copy of the rows in memory of its own."""
        return Rows(*(column.copy() for column in vars(self).values()))

    def take(self, chosen: NDArray[np.bool_]) -> Rows:
        """Returns the rows for which ``chosen`` (n) is true."""
        return Rows(*(column[chosen] if len(column) else column for column in vars(self).values()))


def encode_rows(parts: Sequence[tuple[PartFacts, Rows]], pace: Pace | None = None) -> Encoded:
    """Returns the file of the rows of one table, or of several tables of the same cluster.

    Args:
        parts: the rows of each table.
        pace: as in :func:`~.tensor_file.encode`.
    """
    facts, rows = parts[0]
    metadata = {"cluster": f"{facts.cluster_id:x}", "slot_count": str(facts.slot_count)}
    if len(parts) == 1:
        metadata |= {"format": FORMAT, **{name: str(value) for name, value in _said(facts).items()}}
        return encode(_tensors(facts, rows, ""), _prefixed(metadata), pace)
    metadata |= {"format": SHARED_FORMAT, "tables": json.dumps([_said(facts) for facts, _ in parts])}
    tensors: dict[str, Tensor] = {}
    for facts, rows in parts:
        tensors |= _tensors(facts, rows, f"{facts.table_id}.")
    return encode(tensors, _prefixed(metadata), pace)


def _tensors(facts: PartFacts, rows: Rows, prefix: str) -> dict[str, Tensor]:
    tensors = {
        "key": Tensor("U64", rows.keys),
        "weight": Tensor(_DTYPES[facts.dtype], rows.weights),
        "state": Tensor("F32", rows.state),
        "version": Tensor("U64", rows.versions),
        "update_count": Tensor("U32", rows.update_counts),
    }
    for name in _AGES:
        if len(ages := vars(rows)[name]):
            tensors[name] = Tensor("U32", ages)
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _said(facts: PartFacts) -> dict[str, str | int]:
    """Returns what the header of a file says about the rows of one table."""
    return {
        "table": facts.table,
        "table_id": facts.table_id,
        "dtype": facts.dtype,
        "first_slot": facts.first_slot,
        "end_slot": facts.end_slot,
    }


def _prefixed(metadata: Mapping[str, str]) -> dict[str, str]:
    return {_PREFIX + name: value for name, value in metadata.items()}


def decode_rows(data: memoryview, name: str, *, is_checked: bool = False) -> list[tuple[PartFacts, Rows]]:
    """Returns the rows of a file by table, after comparing its checksum.

    Args:
        data: the bytes of the file.
        name: the name of the file, which error messages have.
        is_checked: whether the caller has compared the checksum in the manifest; then the checksum in the header is not
            compared.

    Raises:
        DataLoss: the file is damaged, or its format is unknown; the text names the file.
    """
    metadata, tensors = decode(data, name)
    said = {key.removeprefix(_PREFIX): value for key, value in metadata.items()}
    if said.get("format") not in (FORMAT, SHARED_FORMAT):
        raise DataLoss(
            f"{name}: the file has format {said.get('format')!r}; this program reads {FORMAT} and {SHARED_FORMAT}"
        )
    if not is_checked:
        check_sum(metadata, list(tensors.values()), name)
    try:
        if said["format"] == FORMAT:
            return [(_facts_of(said, said), _rows_of(tensors, ""))]
        tables = parse_json(said["tables"].encode(), name, MOST_HEADER_BYTES)
        return [(_facts_of(said, table), _rows_of(tensors, f"{table['table_id']}.")) for table in tables]
    except (KeyError, ValueError, TypeError, StopIteration) as error:
        raise DataLoss(f"{name}: the header of the file lacks {error}") from None


def _facts_of(said: Mapping[str, str], table: Mapping[str, Any]) -> PartFacts:
    return PartFacts(
        cluster_id=int(said["cluster"], 16),
        table=table["table"],
        table_id=int(table["table_id"]),
        dtype=next(dtype for dtype in _DTYPES if dtype == table["dtype"]),
        slot_count=int(said["slot_count"]),
        first_slot=int(table["first_slot"]),
        end_slot=int(table["end_slot"]),
    )


def _rows_of(tensors: Mapping[str, Tensor], prefix: str) -> Rows:
    names = ("key", "version", "update_count", "weight", "state")
    for name, dtype in (("key", "U64"), ("version", "U64"), ("update_count", "U32"), ("state", "F32")):
        if tensors[prefix + name].dtype != dtype:
            raise ValueError(f"a {prefix}{name} of dtype {dtype}")
    shapes = [tensors[prefix + name].values.shape for name in names]
    if [len(shape) for shape in shapes] != [1, 1, 1, 2, 2] or len({shape[0] for shape in shapes}) != 1:
        raise ValueError(f"columns {prefix}* of one length")
    aligned = {name: np.require(tensors[prefix + name].values, requirements="A") for name in names}
    ages = {
        name: np.require(tensors[prefix + name].values, requirements="A") for name in _AGES if prefix + name in tensors
    }
    return Rows(*aligned.values(), **ages)
