"""Parses JSON documents from files: their size and depth are bounded, and an error names the field at fault."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, Strict, TypeAdapter, ValidationError

from .errors import DataLoss, SparserowError
from .names import FILE_NAME_FORM, is_file_name
from .route import check_slot_count

MOST_DEPTH = 100  # levels of a document; a job's configuration has about ten

T = TypeVar("T")


def _plain_file_name(name: str) -> str:
    if not is_file_name(name):
        raise ValueError(f"{name!r} is not allowed; allowed: {FILE_NAME_FORM}")
    return name


def _slot_count(count: int) -> int:
    check_slot_count(count)
    return count


def _of_hexadecimal(text: object) -> object:
    return int(text, 16) if isinstance(text, str) and len(text) <= 16 else text


# Annotations for the fields of a document. The types of values must match exactly.
FileName = Annotated[str, Strict(), AfterValidator(_plain_file_name)]
Text = Annotated[str, Strict(), Field(max_length=65536)]
Int = Annotated[int, Strict()]
Count = Annotated[int, Strict(), Field(ge=0, lt=1 << 63)]
Positive = Annotated[int, Strict(), Field(ge=1, lt=1 << 63)]
Id64 = Annotated[int, Strict(), Field(ge=0, lt=1 << 64)]
SlotCount = Annotated[int, Strict(), AfterValidator(_slot_count)]
HexId64 = Annotated[Id64, BeforeValidator(_of_hexadecimal)]  # as a text of hexadecimal digits
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


def check_format(found: object, oldest: int, newest: int, what: str, error: type[SparserowError]) -> None:
    """Refuses what has a format that this program does not read.

    Args:
        found: the number of its format.
        oldest, newest: the numbers that this program reads.
        what: names it in the error's message.
        error: the class of the error.

    Raises:
        error: the number is outside of the range, or no number.
    """
    if type(found) is not int or not oldest <= found <= newest:
        reads = f"format {newest}" if oldest == newest else f"formats {oldest} to {newest}"
        raise error(f"{what} has format {found!r}; this program reads {reads}")


def parse_json(data: bytes | memoryview, where: str, most_bytes: int) -> Any:
    """Returns the value of a document.

    Args:
        data: the document's bytes, in UTF-8.
        where: the name of the file, which begins an error message.
        most_bytes: the largest allowed size, in bytes.

    Raises:
        DataLoss: the document is longer, is nested more than 100 levels deep, or is not JSON.
    """
    if len(data) > most_bytes:
        raise DataLoss(f"{where}: is damaged: it has {len(data)} bytes; allowed: at most {most_bytes}")
    try:
        value = json.loads(bytes(data))
    except RecursionError:
        raise DataLoss(f"{where}: is damaged: it is nested too deep; allowed: {MOST_DEPTH} levels") from None
    except ValueError as error:
        raise DataLoss(f"{where}: is damaged: it is not JSON: {error}") from None
    if _is_deeper(value, MOST_DEPTH):
        raise DataLoss(f"{where}: is damaged: it is nested too deep; allowed: {MOST_DEPTH} levels")
    return value


def checked(adapter: TypeAdapter[T], value: Any, where: str) -> T:
    """Checks a parsed value against an adapter and returns what the adapter makes of it.

    Args:
        adapter: the type of the result.
        value: the value, as :func:`parse_json` returned it.
        where: the name of the file, which begins an error message.

    Raises:
        DataLoss: a field is missing or not allowed; the text names ``where`` and the field.
    """
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise DataLoss(f"{where}: is damaged: {_first_problem(error)}") from None


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(str(part) for part in problem["loc"]) or "the document"
    return f"{field[:200]}: {problem['msg'].removeprefix('Value error, ')}"


def _is_deeper(value: Any, most: int) -> bool:
    """Whether a value has more than ``most`` levels, found without recursion."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(most):
        children = (parent.values() if isinstance(parent, dict) else parent for parent in level)
        level = [child for some in children for child in some if isinstance(child, dict | list)]
        if not level:
            return False
    return True
