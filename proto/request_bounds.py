"""Bounds the numbers of entries in messages of the control plane: before a message is parsed, and for each field."""

from __future__ import annotations

from functools import cache
from typing import Any

from .errors import InvalidArgument

MOST_FIELDS = 1 << 17  # of a message before it is parsed; each entry of a list is one, unless it is of packed numbers
PARSED_BYTES = 8  # of memory for each byte of a message: a number of one byte takes as many
_MOST_TABLES = 1 << 16
_MOST_WORKERS = 1 << 16
_MOST_SLOTS = 1 << 16
_PROOF_BYTES = 32
MOST_STREAM_PARTS = 4_096  # partitions, or files that are not read yet, of one job

# The keys are full names of fields, without the package. For bytes it is their length; for others the number of
# entries. None: the bytes of a message alone bound it.
MOST: dict[str, int | None] = {
    "ShardHeartbeatRequest.lost": 1 << 15,
    "DropTablesRequest.names": _MOST_TABLES,
    "RestoreRequest.renames": _MOST_TABLES,
    "RestoreRequest.tables": _MOST_TABLES,
    "RestoreRequest.accept": 3 * _MOST_TABLES,
    "LoadTable.changed": 3,
    **dict.fromkeys(
        (
            "WorkerHeartbeatRequest.proof",
            "DeregisterWorkerRequest.proof",
            "CheckpointCaller.proof",
            "JobMember.proof_sha256",
        ),
        _PROOF_BYTES,
    ),
    "LeaseDataRequest.done": 1 << 16,
    "LeaseStreamRequest.planned": 1_024,
    **dict.fromkeys(
        (f"LeaseStreamRequest.{name}" for name in ("found", "given_back", "lags", "idle")), MOST_STREAM_PARTS
    ),
    **dict.fromkeys((f"PlannedBatch.{name}" for name in ("ends", "ended", "times")), MOST_STREAM_PARTS),
    "DeregisterWorkerRequest.acknowledged": _MOST_SLOTS,
    "ShardCreateTableRequest.schemas": _MOST_TABLES,
    "Route.runs": _MOST_SLOTS,
    "Refusal.table_ids": _MOST_TABLES,
    "ShardStatsRequest.table_ids": _MOST_TABLES,
    "FreezeJobRequest.fence": _MOST_WORKERS,
    "SetJobRequest.members": _MOST_WORKERS,
    "CutRequest.jobs": _MOST_WORKERS,
    "CutJob.workers": _MOST_WORKERS,
    "CutRequest.base_slots": _MOST_SLOTS,
    "LoadRequest.tables": _MOST_TABLES,
    "GetVersionsRequest.table_ids": _MOST_TABLES,
    "OpenCursorRequest.table_ids": _MOST_TABLES,
    "OpenCursorRequest.versions": 8 * _MOST_SLOTS,
    "ReadChangesRequest.acked_slots": 4 * _MOST_SLOTS,
    "ReadChangesRequest.acked_versions": 8 * _MOST_SLOTS,
    **dict.fromkeys(("OpenCursorRequest.key", "ReadChangesRequest.key", "CloseCursorRequest.key"), 16),
    "LookupRequest.tables": 4096,
    "MakeKeysRequest.values": 1 << 20,
    **dict.fromkeys(("Adam.betas", "Lion.betas", "Lamb.betas"), 2),
    **dict.fromkeys(("PullRowsRequest.keys", "PullRowsRequest.packed_keys"), None),
    **dict.fromkeys(("PushRowsRequest.keys", "PushRowsRequest.packed_keys", "PushRowsRequest.grads"), None),
    **dict.fromkeys(("TableKeys.keys", "TableKeys.packed_keys"), None),
}


def parse(kind: str, raw: bytes, parser: Any) -> Any:
    """Parses a message whose numbers of entries are within their bounds.

    Args:
        kind: the name of the message, for errors.
        raw: the message as it came.
        parser: the function that parses it.

    Raises:
        InvalidArgument: it is no such message, or has more entries than are allowed; the text names the field.
    """
    if _has_more_fields(raw, MOST_FIELDS):
        raise InvalidArgument(f"{kind}: it has more than {MOST_FIELDS} fields and entries of lists")
    try:
        request = parser(raw)
    except Exception as error:  # protobuf's own, which its implementations name differently
        raise InvalidArgument(f"{kind}: it is not such a message: {error}") from None
    check_bounds(request)
    return request


def check_bounds(request: Any) -> None:
    """Checks the number of entries of each repeated field, and the length of each field of bytes.

    Raises:
        InvalidArgument: one has too many; the text has the field and its bound.
    """
    for field, value in request.ListFields():
        if field.type == field.TYPE_BYTES or field.is_repeated:
            name = f"{field.containing_type.name}.{field.name}"
            most = MOST.get(name)
            if most is not None and len(value) > most:
                unit = "bytes" if field.type == field.TYPE_BYTES else "entries"
                raise InvalidArgument(f"{name}: it has {len(value)} {unit}; allowed: at most {most}")
        if field.type == field.TYPE_MESSAGE and has_bounds(field.message_type):
            for message in value if field.is_repeated else [value]:
                check_bounds(message)


@cache
def has_bounds(descriptor: Any) -> bool:
    """Whether a message type, or a message type within it, has a repeated field or one of bytes."""
    return any(
        field.is_repeated
        or field.type == field.TYPE_BYTES
        or (field.type == field.TYPE_MESSAGE and has_bounds(field.message_type))
        for field in descriptor.fields
    )


def _has_more_fields(raw: bytes, most: int) -> bool:
    """Whether a message has more than ``most`` fields, each entry of a repeated one counted, at its top level.

    What cannot be read is left to the parser. (The encoding: protobuf.dev/programming-guides/encoding.)
    """
    if len(raw) <= 2 * most:  # a field takes two bytes at least
        return False
    at, count = 0, 0
    try:
        while at < len(raw):
            count += 1
            if count > most:
                return True
            tag, at = _varint(raw, at)
            kind = tag & 7
            if kind == 0:
                _, at = _varint(raw, at)
            elif kind == 2:
                length, at = _varint(raw, at)
                at += length
            else:
                at += {1: 8, 5: 4}[kind]
    except (IndexError, KeyError):
        pass
    return False


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Returns the number at a place, and the place after it."""
    value = 0
    for digit in range(10):  # longer ones do not exist, and would be numbers of any size
        byte = raw[at + digit]
        value |= (byte & 0x7F) << 7 * digit
        if byte < 0x80:
            return value, at + digit + 1
    raise IndexError
