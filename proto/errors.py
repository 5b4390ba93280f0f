"""The error taxonomy as Python exceptions; one class per code of ``cpp_ext/util/status.h``.

Every error a user meets is a :class:`SparserowError`. Its text is one line: what is at fault, what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar


class SparserowError(Exception):
    """Base of all errors of this package.

    Attributes:
        code: the stable name of the error, as metrics and logs show it.
        number: the number that stands for the error on the wire.
        retryable: whether the same request may succeed later without a change by the caller.
        may_be_applied: whether the shards may have applied the push that failed, or may still apply it. ``table.push``
            sets it when the COMMIT had left. False means that nothing of the push was or will be applied.
    """

    may_be_applied: bool = False

    code: ClassVar[str] = "Internal"
    number: ClassVar[int] = 10
    retryable: ClassVar[bool] = False


class InvalidArgument(SparserowError, ValueError):  # noqa: N818 - names are the taxonomy's
    """The request can never succeed as written: wrong shape, dtype, key, option or configuration."""

    code, number = "InvalidArgument", 1


class NotFound(SparserowError, LookupError):  # noqa: N818
    """A table, job, namespace or file of that name does not exist."""

    code, number = "NotFound", 2


class FailedPrecondition(SparserowError, RuntimeError):  # noqa: N818
    """The state of the system forbids the request.

    Examples are a differing schema, a step without backward, and a session used after a fork.
    """

    code, number = "FailedPrecondition", 3


class StaleRoute(SparserowError, RuntimeError):  # noqa: N818
    """The caller's slot map is older than the shard's."""

    code, number, retryable = "StaleRoute", 4, True


class Fenced(SparserowError, RuntimeError):  # noqa: N818
    """The worker's lease ended and its place was given away; the worker has to connect anew.

    A step that ends with this error may have been applied.
    """

    code, number = "Fenced", 5


class Unavailable(SparserowError, ConnectionError):  # noqa: N818
    """The peer cannot be reached, is starting or is draining."""

    code, number, retryable = "Unavailable", 6, True


class DeadlineExceeded(SparserowError, TimeoutError):  # noqa: N818
    """The deadline passed.

    A commit that ends so may or may not have been applied; it is safe to send it again under its sequence number.
    """

    code, number = "DeadlineExceeded", 7


class ResourceExhausted(SparserowError, MemoryError):  # noqa: N818
    """A memory or in-flight budget is reached; nothing was applied."""

    code, number, retryable = "ResourceExhausted", 8, True


class DataLoss(SparserowError, OSError):  # noqa: N818
    """A checksum failed: stored or received bytes are damaged."""

    code, number = "DataLoss", 9


class Internal(SparserowError, RuntimeError):  # noqa: N818
    """A bug of Sparserow; please report it."""

    code, number = "Internal", 10


class OutsideQuorum(SparserowError, RuntimeError):  # noqa: N818
    """The step has its quorum of workers without this one; nothing of its commit was or will be applied."""

    code, number = "OutsideQuorum", 11


class PermissionDenied(SparserowError, PermissionError):  # noqa: N818
    """The token is missing, is not one that the server knows, or does not permit the request; nothing was applied."""

    code, number = "PermissionDenied", 12


def not_allowed(field: str, value: object, allowed: str | Iterable[str]) -> InvalidArgument:
    """Returns the error for a value that a field cannot have.

    Args:
        field: the name as the caller wrote it, such as ``train.lr`` or ``--rows``.
        value: the refused value; the text shows its ``repr``.
        allowed: the allowed values, or a text that describes them.
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
        OutsideQuorum,
        PermissionDenied,
    )
}


def error_of(number: int, message: str) -> SparserowError:
    """Returns the exception for a code on the wire; an unknown code becomes :class:`Internal`."""
    return _BY_NUMBER.get(number, Internal)(message)


def typed_error(error: Exception) -> Exception:
    """Returns the error of the taxonomy for an error that torch raised, or ``error`` itself when its text names no
    class.

    Torch turns an exception of a C++ operator into a RuntimeError whose text begins with the name of the class.
    """
    name, colon, message = str(error).partition(": ")
    kind = next((kind for kind in _BY_NUMBER.values() if kind.__name__ == name), None) if colon else None
    return error if kind is None else kind(message)


def all_errors() -> tuple[type[SparserowError], ...]:
    """Returns every class of the taxonomy, ordered by number."""
    return tuple(_BY_NUMBER.values())
