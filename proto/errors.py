"""The error taxonomy as Python exceptions; one class per code of ``cpp_ext/util/status.h``.

Every error a user meets is a :class:`SparserowError`. Its text is one line: what is at fault, what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar


class SparserowError(Exception):
    """Base of all errors of this package.

    Attributes:
        code: stable name of the error, as in metrics and logs.
        number: its value on the wire.
        retryable: whether the same request may succeed later without a change by the caller.
        may_be_applied: set by ``table.push``: its COMMIT had left, so that the shards may have applied the push, or
            will. False means that nothing of it was or will be applied.
    """

    may_be_applied: bool = False

    code: ClassVar[str] = "Internal"
    number: ClassVar[int] = 10
    retryable: ClassVar[bool] = False


class InvalidArgument(SparserowError, ValueError):  # noqa: N818 - names are the taxonomy's
    """The request can never succeed as written: wrong shape, dtype, key, option or configuration."""

    code, number = "InvalidArgument", 1


class NotFound(SparserowError, LookupError):  # noqa: N818
    """No such table, job, namespace or file."""

    code, number = "NotFound", 2


class FailedPrecondition(SparserowError, RuntimeError):  # noqa: N818
    """The state of the system forbids it: a differing schema, a step without backward, a session used after fork."""

    code, number = "FailedPrecondition", 3


class StaleRoute(SparserowError, RuntimeError):  # noqa: N818
    """The caller's slot map is older than the shard's."""

    code, number, retryable = "StaleRoute", 4, True


class Fenced(SparserowError, RuntimeError):  # noqa: N818
    """The worker's lease ended and its place was given away; connect anew. A step that ends so may have been
    applied.
    """

    code, number = "Fenced", 5


class Unavailable(SparserowError, ConnectionError):  # noqa: N818
    """The peer cannot be reached, is starting or is draining."""

    code, number, retryable = "Unavailable", 6, True


class DeadlineExceeded(SparserowError, TimeoutError):  # noqa: N818
    """The deadline passed; a commit that ends so may or may not have been applied, and is safe to send again under its
    sequence number.
    """

    code, number = "DeadlineExceeded", 7


class ResourceExhausted(SparserowError, MemoryError):  # noqa: N818
    """A memory or in-flight budget is reached; nothing was applied."""

    code, number, retryable = "ResourceExhausted", 8, True


class DataLoss(SparserowError, OSError):  # noqa: N818
    """A checksum failed."""

    code, number = "DataLoss", 9


class Internal(SparserowError, RuntimeError):  # noqa: N818
    """A bug of ours; please report it."""

    code, number = "Internal", 10


def not_allowed(field: str, value: object, allowed: str | Iterable[str]) -> InvalidArgument:
    """The error of a value that a field cannot have.

    Args:
        field: the name as the caller wrote it, such as ``train.lr`` or ``--rows``.
        value: what was given; it is shown as Python shows it.
        allowed: what may be given, as text or as the values themselves.
    """
    choices = allowed if isinstance(allowed, str) else ", ".join(allowed)
    return InvalidArgument(f"{field}: {value!r} is not allowed; allowed: {choices}")


_BY_NUMBER: dict[int, type[SparserowError]] = {
    kind.number: kind
    for kind in (
        InvalidArgument,
        NotFound,
        FailedPrecondition,
        StaleRoute,
        Fenced,
        Unavailable,
        DeadlineExceeded,
        ResourceExhausted,
        DataLoss,
        Internal,
    )
}


def error_of(number: int, message: str) -> SparserowError:
    """The exception for a code on the wire; an unknown code becomes :class:`Internal`."""
    return _BY_NUMBER.get(number, Internal)(message)


def typed_error(error: Exception) -> Exception:
    """The error of the taxonomy that an op's error stands for, or ``error`` itself when its text names no class.

    Torch turns an exception of C++ into a RuntimeError, whose text begins with the name of the class.
    """
    name, colon, message = str(error).partition(": ")
    kind = next((kind for kind in _BY_NUMBER.values() if kind.__name__ == name), None) if colon else None
    return error if kind is None else kind(message)


def all_errors() -> tuple[type[SparserowError], ...]:
    """Every class of the taxonomy, by its number."""
    return tuple(_BY_NUMBER.values())
