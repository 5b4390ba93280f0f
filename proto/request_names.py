"""Names in requests of the control plane: each has a bound, which is checked before a method sees the request."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from .errors import InvalidArgument
from .names import check_file_name

MOST_NAME = 255  # characters of a namespace, table, job, host, run, save or checkpoint
MOST_FULL_NAME = 511  # of NAMESPACE/NAME
MOST_MODEL = 201  # of NAME@ALIAS
MOST_CURSOR = 511  # of a follower, whose name has its place and address
MOST_ROUTING_KEY = 4096
MOST_CHECKSUM = 64

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
            raise InvalidArgument(f"{what}: has {len(text)} characters; allowed: at most {characters}")

    return check


def _unbounded(_what: str, _text: str) -> None:
    """A text is bounded by its method."""


_NAME, _FULL_NAME = _at_most(MOST_NAME), _at_most(MOST_FULL_NAME)
_CURSOR, _MODEL = _at_most(MOST_CURSOR), _at_most(MOST_MODEL)

# By the full name of the field, without the package.
NAMES: dict[str, Check] = {
    **dict.fromkeys(
        (
            *("TableSchema.namespace", "TableSchema.name", "Address.host", "ListTablesRequest.namespace"),
            *("DropTableRequest.namespace", "DropTableRequest.name", "DropTablesRequest.namespace"),
            "DropTablesRequest.names",
            *("SweepTableRequest.namespace", "SweepTableRequest.name"),
            *("RegisterWorkerRequest.namespace", "RegisterWorkerRequest.job", "RegisterWorkerRequest.host"),
            *("ReportFaultRequest.host", "LeaseDataRequest.run", "EnterSaveRequest.name", "GetSaveRequest.name"),
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
    **dict.fromkeys(
        (
            *("GetVersionsRequest.cursor", "OpenCursorRequest.cursor", "ReadChangesRequest.cursor"),
            "CloseCursorRequest.cursor",
        ),
        _CURSOR,
    ),
    "LookupRequest.model": _MODEL,
    "DescribeRequest.model": _MODEL,
    "LookupRequest.routing_key": _short_text(MOST_ROUTING_KEY),
    "WrittenFile.file": check_file_name,
    "WrittenFile.xxh3": _at_most(MOST_CHECKSUM),
}
# Texts that are no names: their own methods bound them, and gRPC bounds the message.
TEXTS = frozenset(
    {
        *(
            "ReportFaultRequest.message",
            "ReportFaultRequest.traceback",
            "EnterSaveRequest.config_json",
            "KeepRowsRequest.config_json",
        ),
        *("EnterSaveRequest.problem", "Refusal.message", "LoadRequest.windows_json"),
        *("BeginSaveRequest.url", "EnterSaveRequest.url", "KeepRowsRequest.url", "GetSaveRequest.url"),
        *("RestoreRequest.url", "CutRequest.base_url", "DumpRequest.url", "LoadRequest.url"),
    }
)


def check_names(request: Any) -> None:
    """Raises InvalidArgument, naming the field and its bound, where a name in a request is too long or not printable.

    An absent name is left to the method.
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
    """Whether a message, or one in it, has a field of text."""
    return any(
        field.type == field.TYPE_STRING or (field.type == field.TYPE_MESSAGE and has_strings(field.message_type))
        for field in descriptor.fields
    )


def _field_name(field: Any) -> str:
    return f"{field.containing_type.name}.{field.name}"
