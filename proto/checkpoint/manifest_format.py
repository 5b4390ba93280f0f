"""The file of a checkpoint's manifest: JSON with a checksum; each row file stands once, and parts name its number."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash
from google.protobuf.message import DecodeError as ProtobufDecodeError

from .. import control_pb2 as pb
from ..documents import check_format, parse_json
from ..errors import DataLoss, FailedPrecondition, ResourceExhausted, SparserowError
from ..schema_message import message_of_schema, schema_of_message
from .entries import TableEntry

FORMAT, OLDEST_FORMAT = 1, 1  # what is written, and the oldest that is read
MOST_BYTES = 256 << 20  # the largest size of a manifest


def bytes_of_manifest(fields: Mapping[str, Any], tables: Sequence[TableEntry], where: str) -> bytes:
    """Returns the bytes of a manifest's file.

    Args:
        fields: the fields of the manifest but its tables, as plain values.
        tables: its tables.
        where: the name of the file, which error messages have.

    Raises:
        ResourceExhausted: the file is larger than a program reads.
    """
    document = dict(fields)
    parts = {part.file: part for table in tables for part in table.parts}
    number = {file: index for index, file in enumerate(parts)}
    document["parts"] = [[part.file, part.bytes, part.xxh3, part.shard] for part in parts.values()]
    document["tables"] = [
        {
            "name": table.schema.full_name,
            "schema": base64.b64encode(message_of_schema(table.schema).SerializeToString()).decode(),
            "optimizer": type(table.schema.optimizer).__name__,
            "dim": table.schema.dim,
            "dtype": table.schema.dtype,
            "parts": [[number[part.file], part.first_slot, part.end_slot, part.rows] for part in table.parts],
        }
        for table in tables
    ]
    document["cluster_id"] = f"{fields['cluster_id']:x}"
    body = json.dumps({"format": FORMAT, **document}, sort_keys=True)
    data = json.dumps({"xxh3": _checksum(body), "checkpoint": json.loads(body)}, indent=1).encode()
    if len(data) > MOST_BYTES:
        raise ResourceExhausted(f"{where}: the manifest has {len(data)} bytes; allowed: at most {MOST_BYTES}")
    return data


def fields_of_bytes(data: bytes, where: str) -> dict[str, Any]:
    """Returns the fields of the manifest that a file's bytes hold; they are not checked yet.

    Args:
        data: the bytes of the file.
        where: the name of the file, which error messages have.

    Raises:
        DataLoss: the file is damaged.
        FailedPrecondition: the file has another format.
    """
    document = parse_json(data, where, MOST_BYTES)
    try:
        body = document["checkpoint"]
        check_format(body["format"], OLDEST_FORMAT, FORMAT, f"{where}: the manifest", FailedPrecondition)
        if document["xxh3"] != _checksum(json.dumps(body, sort_keys=True)):
            raise DataLoss(f"{where}: is damaged: its checksum does not match")
        return _fields_of(body)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ProtobufDecodeError) as error:
        if isinstance(error, SparserowError):
            raise
        raise DataLoss(f"{where}: is damaged, or is not a manifest: {type(error).__name__}: {error}") from None


def _fields_of(body: dict[str, Any]) -> dict[str, Any]:
    written = body["parts"]
    tables = [
        {
            "schema": schema_of_message(pb.TableSchema.FromString(base64.b64decode(table["schema"]))),
            "parts": [_part_of(part, written) for part in table["parts"]],
        }
        for table in body["tables"]
    ]
    return {**body, "tables": tables}


def _checksum(text: str) -> str:
    return str(xxhash.xxh3_64_hexdigest(text.encode()))


def _part_of(part: list[Any], written: list[list[Any]]) -> dict[str, Any]:
    number, first_slot, end_slot, rows = part
    if type(number) is not int or number < 0:
        raise ValueError(f"a part's file is number {number!r}; allowed: an integer >= 0")
    file, size, xxh3, shard = written[number]
    facts = {"file": file, "bytes": size, "xxh3": xxh3, "shard": shard}
    return {**facts, "first_slot": first_slot, "end_slot": end_slot, "rows": rows}
