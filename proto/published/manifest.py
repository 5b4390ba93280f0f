"""The manifest of a published version of a model: its rows, its program and its card.

A version is immutable once its manifest is there.

ROOT/MODEL/v000001/                 one version, complete once manifest.json is there
    rows.TABLE.SHARD.N.safetensors  rows (row_parts.py)
    slots.safetensors               a version of each slot that the rows have reached, where live sync begins
    program.pt2                     the model by torch.export, when there is one
    features.json, vocabulary.N.txt what makes the program's arguments of columns, when it was published with features
    claim.json                      the process that took the number; it stays when the publication is given up
    manifest.json                   the list of all files, with sizes and checksums; written last
ROOT/MODEL/aliases.json             the aliases, which move between versions (registry.py)
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal, TypeAlias

from google.protobuf import json_format
from pydantic import BeforeValidator, TypeAdapter

from .. import control_pb2 as pb
from ..checkpoint.manifest import FileFacts
from ..documents import Count, HexId64, Positive, SlotCount, Text, check_format, checked, parse_json
from ..errors import DataLoss, ResourceExhausted
from ..schema import DTYPES, Dtype, TableSchema
from ..schema_message import message_of_schema, schema_of_message
from ..security.security import Security
from .proof import Proof, check_proof, make_proof

FORMAT, OLDEST_FORMAT = 1, 1  # what is written, and the oldest that is read
MANIFEST = "manifest.json"
SLOTS = "slots.safetensors"
PROGRAM = "program.pt2"
MOST_BYTES = 64 << 20  # the largest size of a manifest
_PLAIN_FIELDS = ("model", "version", "created", "slot_count", "namespace", "card", "sign")

Sign: TypeAlias = Literal["rows"]
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
class HashedFile(FileFacts):
    """A file with its SHA-256 in hexadecimal digits, because XXH3 does not stop one who forges a file."""

    sha256: Text


@dataclass(frozen=True)
class Part(FileFacts):
    """A file with some rows of a table; ``sha256`` is None unless the publisher has signed the rows."""

    rows: Count
    sha256: Text | None = None


@dataclass(frozen=True)
class PublishedTable:
    """A table of a version.

    Attributes:
        schema: the schema of the table in training.
        dtype: the dtype of the published rows.
        parts: the files of the rows.
    """

    schema: DocumentSchema
    dtype: ServedDtype
    parts: tuple[Part, ...]

    @property
    def rows(self) -> int:
        """The number of published rows."""
        return sum(part.rows for part in self.parts)


@dataclass(frozen=True)
class ModelManifest:
    """A version of a model.

    Attributes:
        model, version: the name of the model and the number of the version, counted from 1.
        created: the time of publication in UTC, ISO 8601.
        cluster_id, slot_count: facts of the cluster that trained the model.
        namespace: the namespace of its tables.
        tables: the tables and the files of their rows.
        slots: the file with the version of each slot.
        program: the exported model; None when only rows were published.
        card: the publisher's facts about the version, such as step, data_position and auc.
        features: the files that make the program's arguments of columns; () when it takes tensors.
        sign: "rows": the proof covers the rows too; None: it covers everything else.
        proof: the signature of the publisher; None when it had no signing key.
    """

    model: Text
    version: Positive
    created: Text
    cluster_id: HexId64
    slot_count: SlotCount
    namespace: Text
    tables: tuple[PublishedTable, ...]
    slots: HashedFile
    program: HashedFile | None = None
    card: dict[str, Any] = field(default_factory=dict)
    features: tuple[HashedFile, ...] = ()
    sign: Sign | None = None
    proof: Proof | None = None

    @property
    def rows(self) -> int:
        """The number of rows of all tables."""
        return sum(table.rows for table in self.tables)

    @property
    def files(self) -> tuple[FileFacts, ...]:
        """All files that the manifest names."""
        parts = [part for table in self.tables for part in table.parts]
        return (*parts, self.slots, *self.features, *(() if self.program is None else (self.program,)))

    @property
    def size(self) -> int:
        """The size of all files that the manifest names, in bytes."""
        return sum(file.bytes for file in self.files)

    def to_json(self) -> bytes:
        """Returns the bytes of the manifest's file.

        Raises:
            ResourceExhausted: the file is larger than a program reads.
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
            **{name: getattr(self, name) for name in _PLAIN_FIELDS},
            "cluster_id": f"{self.cluster_id:016x}",
            "tables": tables,
            "slots": asdict(self.slots),
            "program": None if self.program is None else asdict(self.program),
            "features": [asdict(file) for file in self.features],
            "proof": None if self.proof is None else asdict(self.proof),
        }
        data = json.dumps(document, indent=2).encode() + b"\n"
        if len(data) > MOST_BYTES:
            raise ResourceExhausted(f"{MANIFEST}: the manifest has {len(data)} bytes; allowed: at most {MOST_BYTES}")
        return data

    def signed(self, security: Security) -> ModelManifest:
        """Returns the manifest with its publisher's proof, if the security file names a signing key."""
        return replace(self, proof=make_proof("version", _signed_fields(json.loads(self.to_json())), security))

    @staticmethod
    def from_json(data: bytes, where: str, security: Security | None = None) -> ModelManifest:
        """Returns the manifest that a file's bytes hold.

        Args:
            data: the bytes of the file.
            where: the name of the file, which begins an error message.
            security: names the keys of trusted publishers; None: no signature is checked.

        Raises:
            DataLoss: the file is damaged, or has another format; the text names ``where``.
            FailedPrecondition: there is a verification key, and no trusted publisher signed the manifest as it is.
        """
        document = parse_json(data, where, MOST_BYTES)
        found = document.get("format") if isinstance(document, dict) else None
        check_format(found, OLDEST_FORMAT, FORMAT, f"{where}: the manifest", DataLoss)
        manifest = checked(_MANIFEST, document, where)
        if security is not None:
            check_proof("version", _signed_fields(document), manifest.proof, security, where)
        return manifest


_MANIFEST = TypeAdapter(ModelManifest)


def _signed_fields(document: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a manifest's document that its proof covers: without the files of rows unless it says so.

    These are fields of the document and not of the parsed manifest, so that a reader may know more fields than the
    publisher.
    """
    if document.get("sign") == "rows":
        return document
    tables = [{name: table[name] for name in table if name != "parts"} for table in document["tables"]]
    return {**document, "tables": tables}
