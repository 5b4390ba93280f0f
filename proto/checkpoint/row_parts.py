"""Rows of a run of slots of one table as a safetensors file: what a shard writes, and any shard or program reads.

Tensors, n rows each: ``key`` uint64, ``weight`` (n, dim) as the table stores it, ``state`` (n, floats of the
optimizer) float32, ``version`` uint64 (lineage << 48 | the slot's sequence), ``update_count`` uint32; and where the
table's policy asks for it ``age_steps`` uint32, steps between the last push to the row and the cut, and
``push_seconds`` uint32, the unix time of that push.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataLoss
from ..schema import Dtype
from .tensor_file import Encoded, Tensor, check_sum, decode, encode

FORMAT = "1"
_PREFIX = "sparserow."
_AGES = ("age_steps", "push_seconds")
_DTYPES: dict[Dtype, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True)
class PartFacts:
    """What a part says of itself.

    Attributes:
        cluster_id: of the cluster that wrote it.
        table: ``namespace/name``; ``table_id`` is its hash.
        dtype: of the stored weights.
        slot_count: of the cluster.
        first_slot, end_slot: its rows are of slots [first_slot, end_slot). Those that changed while a checkpoint was
            written may be in another file of it than their slots' other rows.
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
    """Columns of rows: keys (n), versions (n), update_counts (n), weights (n, dim), state (n, floats), and for policies
    that ask for them age_steps and push_seconds (n), else (0).
    """

    keys: NDArray[np.uint64]
    versions: NDArray[np.uint64]
    update_counts: NDArray[np.uint32]
    weights: NDArray[Any]
    state: NDArray[np.float32]
    age_steps: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    push_seconds: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))

    def take(self, chosen: NDArray[np.bool_]) -> Rows:
        """The rows for which ``chosen`` (n) is true."""
        return Rows(*(column[chosen] if len(column) else column for column in vars(self).values()))


def encode_rows(facts: PartFacts, rows: Rows) -> Encoded:
    """The file."""
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
    metadata = {
        "format": FORMAT,
        "cluster": f"{facts.cluster_id:x}",
        "table": facts.table,
        "table_id": str(facts.table_id),
        "dtype": facts.dtype,
        "slot_count": str(facts.slot_count),
        "first_slot": str(facts.first_slot),
        "end_slot": str(facts.end_slot),
    }
    return encode(tensors, {_PREFIX + name: value for name, value in metadata.items()})


def decode_rows(data: memoryview, name: str, *, is_checked: bool = False) -> tuple[PartFacts, Rows]:
    """The rows of a file, whose checksum holds.

    Args:
        data: its bytes.
        name: for errors.
        is_checked: they have the checksum that a manifest gives, so that of the file's own header is not compared.

    Raises:
        DataLoss: it is damaged, or of another format; names it.
    """
    metadata, tensors = decode(data, name)
    said = {key.removeprefix(_PREFIX): value for key, value in metadata.items()}
    if said.get("format") != FORMAT:
        raise DataLoss(f"{name}: has format {said.get('format')!r}; this program reads {FORMAT}")
    if not is_checked:
        check_sum(metadata, list(tensors.values()), name)
    try:
        facts = PartFacts(
            cluster_id=int(said["cluster"], 16),
            table=said["table"],
            table_id=int(said["table_id"]),
            dtype=next(dtype for dtype in _DTYPES if dtype == said["dtype"]),
            slot_count=int(said["slot_count"]),
            first_slot=int(said["first_slot"]),
            end_slot=int(said["end_slot"]),
        )
        columns = (tensors[name].values for name in ("key", "version", "update_count", "weight", "state"))
        return facts, Rows(*columns, **{name: tensors[name].values for name in _AGES if name in tensors})
    except (KeyError, ValueError, StopIteration) as error:
        raise DataLoss(f"{name}: its header lacks {error}") from None
