"""Bounds the names in requests of the control plane; a method sees a request only after this check."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from .errors import InvalidArgument
from .names import check_file_name

MOST_NAME = 255  # characters of a namespace, table, job, host, run, save or checkpoint
MOST_FULL_NAME = 511  # characters of NAMESPACE/NAME
MOST_MODEL = 201  # characters of NAME@ALIAS
MOST_CURSOR = 511  # characters of a follower's cursor, which contains its shard assignment and address
MOST_ROUTING_KEY = 4096
MOST_CHECKSUM = 64
MOST_STREAM_PART = 1024  # characters of a partition, a file of a followed folder, or what describes a stream

Check = Callable[[str, str], None]


def _at_most(characters: int) -> Check:
    def check(what: str, name: str) -> None:
        if len(name) > characters or not name.isprintable():
            raise InvalidArgument(
                f"{what}: {name[:80]!r} of {len(name)} characters is not allowed; allowed: at most {characters} "
                "printable characters"
            )

    return check


def _short_text(characters: int) -> Check:
    def check(what: str, text: str) -> None:
        if len(text) > characters:
            raise InvalidArgument(f"{what}: the text has {len(text)} characters; allowed: at most {characters}")

    return check


def _unbounded(_what: str, _text: str) -> None:
    """Accepts any text, because the method that receives it sets its bound."""


_NAME, _FULL_NAME = _at_most(MOST_NAME), _at_most(MOST_FULL_NAME)
_CURSOR, _MODEL = _at_most(MOST_CURSOR), _at_most(MOST_MODEL)

# The keys are full names of fields, without the package.
NAMES: dict[str, Check] = {
    **dict.fromkeys(
        (
            *("TableSchema.namespace", "TableSchema.name", "Address.host", "ListTablesRequest.namespace"),
            *("DropTableRequest.namespace", "DropTableRequest.name", "DropTablesRequest.namespace"),
            "DropTablesRequest.names",
            *("SweepTableRequest.namespace", "SweepTableRequest.name"),
            *("RegisterWorkerRequest.namespace", "RegisterWorkerRequest.job", "RegisterWorkerRequest.host"),
            *(
                "ReportFaultRequest.host",
                "LeaseDataRequest.run",
                "LeaseStreamRequest.run",
                "EnterSaveRequest.name",
                "GetSaveRequest.name",
            ),
            *("RestoreRequest.name", "RestoreRequest.namespace", "CutRequest.save", "DumpRequest.save"),
            *("EndCutRequest.save", "LoadRequest.name"),
            *("PullRowsRequest.namespace", "PullRowsRequest.table"),
            *("PushRowsRequest.client", "PushRowsRequest.namespace", "PushRowsRequest.table", "TableKeys.table"),
        ),
        _NAME,
    ),
    **dict.fromkeys(
        ("TableRename.saved", "TableRename.name", "RestoreRequest.tables", "SetJobRequest.name"), _FULL_NAME
    ),
    "RestoreRequest.accept": _at_most(MOST_FULL_NAME + len(".optimizer")),
    "LoadTable.changed": _NAME,
    **dict.fromkeys(
        (
            *("GetVersionsRequest.cursor", "OpenCursorRequest.cursor", "ReadChangesRequest.cursor"),
            "CloseCursorRequest.cursor",
        ),
        _CURSOR,
    ),
    **dict.fromkeys(("LookupRequest.model", "MakeKeysRequest.model"), _MODEL),
    "DescribeRequest.model": _MODEL,
    **dict.fromkeys(("LookupRequest.routing_key", "MakeKeysRequest.routing_key"), _short_text(MOST_ROUTING_KEY)),
    "MakeKeysRequest.feature": _NAME,
    "FollowerFigures.aliases": _NAME,
    "TrainingFigures.test_metric": _NAME,
    **dict.fromkeys(
        (
            *(f"LeaseStreamRequest.{name}" for name in ("source", "given_back", "idle")),
            *("PartNumber.part", "PlannedBatch.ended", "FoundPart.name"),
        ),
        _at_most(MOST_STREAM_PART),
    ),
    "WrittenFile.file": check_file_name,
    "WrittenFile.xxh3": _at_most(MOST_CHECKSUM),
}
# Texts that are not names: the methods that receive them set their bounds, and gRPC bounds the message.
TEXTS = frozenset(
    {
        *(
            "ReportFaultRequest.message",
            "ReportFaultRequest.traceback",
            "EnterSaveRequest.config_json",
            "KeepRowsRequest.config_json",
        ),
        *("EnterSaveRequest.problem", "Refusal.message", "LoadRequest.windows_json", "MakeKeysRequest.values"),
        *("BeginSaveRequest.url", "EnterSaveRequest.url", "KeepRowsRequest.url", "GetSaveRequest.url"),
        *("RestoreRequest.url", "CutRequest.base_url", "DumpRequest.url", "LoadRequest.url"),
    }
)


def check_names(request: Any) -> None:
    """Checks every name in a request; an absent name is left to the method.

    Raises:
        InvalidArgument: a name is too long or not printable; the text has the field and its bound.
    """
    for field, value in request.ListFields():
        if field.type == field.TYPE_STRING:
            check = NAMES.get(_field_name(field), _unbounded)
            for name in [value] if isinstance(value, str) else value:
                check(_field_name(field), name)
        elif field.type == field.TYPE_MESSAGE and has_strings(field.message_type):
            for message in [value] if hasattr(value, "ListFields") else value:
                check_names(message)


@cache
def has_strings(descriptor: Any) -> bool:
    """Whether a message type, or a message type within it, has a field of text."""
    return any(
        field.type == field.TYPE_STRING or (field.type == field.TYPE_MESSAGE and has_strings(field.message_type))
        for field in descriptor.fields
    )


def _field_name(field: Any) -> str:
    return f"{field.containing_type.name}.{field.name}"
