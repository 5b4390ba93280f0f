"""The type of a path or URL in a configuration: a text that is not blank."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import AfterValidator

from ..errors import InvalidArgument


def _not_blank(path: str) -> str:
    # As of a variable of the shell that is not set; most libraries take an empty path for the present folder.
    if not path.strip():
        raise InvalidArgument(f"{path!r} is empty; expected the name of a place")
    return path


PathText: TypeAlias = Annotated[str, AfterValidator(_not_blank)]
