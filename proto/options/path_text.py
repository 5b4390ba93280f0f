"""The types of a path or URL, and of several, in a configuration: texts that are not blank."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from ..errors import InvalidArgument


def _not_blank(path: str) -> str:
    # As of a variable of the shell that is not set; most libraries take an empty path for the present folder.
    if not path.strip():
        raise InvalidArgument(f"{path!r} is empty; expected the name of a place")
    return path


def one_or_several(value: object) -> object:
    """Returns a text alone, or a list of texts, as a tuple."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


PathText: TypeAlias = Annotated[str, AfterValidator(_not_blank)]
Paths: TypeAlias = Annotated[
    tuple[PathText, ...],
    BeforeValidator(one_or_several),
    Field(
        min_length=1,
        json_schema_extra={"allowed": "a path or URL, or a sequence of them; * and ? match file names"},
    ),
]
