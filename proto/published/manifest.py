"""What a published version of a model is: its rows, its program, its card. Immutable once its manifest is there.

ROOT/MODEL/v000001/                 one version; without manifest.json it is none
    rows.TABLE.SHARD.N.safetensors  rows (row_parts.py)
    slots.safetensors               the version of each slot that the rows have at least: where live sync begins
    program.pt2                     the model by torch.export, where there is one
    claim.json                      which process took the number; stays when its publication is given up
    manifest.json                   written last: all of it, with sizes and checksums
ROOT/MODEL/aliases.json             names that move (registry.py)
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from google.protobuf import json_format
from pydantic import BeforeValidator, TypeAdapter

from .. import control_pb2 as pb
from ..checkpoint.manifest import FileFacts
from ..documents import Count, HexId64, Positive, SlotCount, Text, checked, parse_json
from ..errors import DataLoss, ResourceExhausted
from ..schema import DTYPES, Dtype, TableSchema
from ..schema_message import message_of_schema, schema_of_message
from .program_proof import ProgramProof

FORMAT = 1
MANIFEST = "manifest.json"
SLOTS = "slots.safetensors"
PROGRAM = "program.pt2"
MOST_BYTES = 64 << 20  # of a manifest

ServedDtype: TypeAlias = Dtype | Literal["int8"]
SERVED_DTYPES: tuple[ServedDtype, ...] = (*DTYPES, "int8")


def _schema_of_document(document: object) -> object:
    return (
        document
        if isinstance(document, TableSchema)
        else schema_of_message(json_format.ParseDict(document, pb.TableSchema(), max_recursion_depth=20))
    )


DocumentSchema = Annotated[TableSchema, BeforeValidator(_schema_of_document)]


@dataclass(frozen=True)
class Part(FileFacts):
    """Some rows of a table."""

    rows: Count


@dataclass(frozen=True)
class PublishedTable:
    """A table of a version; ``dtype`` is that of the published rows, ``schema`` the table's in training."""

    schema: DocumentSchema
    dtype: ServedDtype
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        """How many were published."""
        return sum(part.rows for part in self.parts)


@dataclass(frozen=True)
class ModelManifest:
    """A version.

    Attributes:
        model, version: ``version`` counts from 1.
        created: UTC, ISO 8601.
        cluster_id, slot_count: of the cluster that trained it.
        namespace: of its tables.
        tables: by name.
        slots: the file with the version of each slot.
        program: the exported model; None where only rows were published.
        card: what its publisher says of it: step, data_position, auc, and more.
        proof: the program's SHA-256 and signature; None: the version before published it.
    """

    model: Text
    version: Positive
    created: Text
    cluster_id: HexId64
    slot_count: SlotCount
    namespace: Text
    tables: tuple[PublishedTable, ...]
    slots: FileFacts
    program: FileFacts | None = None
    card: dict[str, Any] = field(default_factory=dict)
    proof: ProgramProof | None = None

    @property
    def rows(self) -> int:
        """Of all tables."""
        return sum(table.rows for table in self.tables)

    @property
    def size(self) -> int:
        """Bytes of all files that it names."""
        parts = sum(part.bytes for table in self.tables for part in table.parts)
        return parts + self.slots.bytes + (self.program.bytes if self.program is not None else 0)

    def to_json(self) -> bytes:
        """The manifest's file.

        Raises:
            ResourceExhausted: it is longer than a program reads.
        """
        tables = [
            {
                "schema": json_format.MessageToDict(message_of_schema(table.schema), preserving_proto_field_name=True),
                "dtype": table.dtype,
                "parts": [asdict(part) for part in table.parts],
            }
            for table in self.tables
        ]
        document = {
            "format": FORMAT,
            **{key: getattr(self, key) for key in ("model", "version", "created", "slot_count", "namespace", "card")},
            "cluster_id": f"{self.cluster_id:016x}",
            "tables": tables,
            "slots": asdict(self.slots),
            "program": None if self.program is None else asdict(self.program),
            "program_proof": None if self.proof is None else asdict(self.proof),
        }
        data = json.dumps(document, indent=2).encode() + b"\n"
        if len(data) > MOST_BYTES:
            raise ResourceExhausted(f"{MANIFEST}: has {len(data)} bytes; allowed: at most {MOST_BYTES}")
        return data

    @staticmethod
    def from_json(data: bytes, where: str) -> ModelManifest:
        """A manifest from its file.

        Raises:
            DataLoss: it is damaged, or of another format; names ``where``.
        """
        document = parse_json(data, where, MOST_BYTES)
        found = document.get("format") if isinstance(document, dict) else None
        if found != FORMAT:
            raise DataLoss(f"{where}: is damaged: has format {found!r}; this program reads {FORMAT}")
        document["proof"] = document.pop("program_proof", None)
        return checked(_MANIFEST, document, where)


_MANIFEST = TypeAdapter(ModelManifest)
