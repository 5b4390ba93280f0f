"""The base of every section of options, and the types of their fields."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from .units import BYTES_FORM, SECONDS_FORM, parse_bytes, parse_seconds


class StrictModel(BaseModel):
    """Base of every section: it refuses unknown keys, does not coerce values, and its instances are frozen.

    Types must match exactly, except that an integer is also accepted as a number. A tuple field is declared as
    ``Annotated[tuple[X, ...], FromList]``, so that a YAML sequence fills it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, serialize_by_alias=True)


def _tuple_of_list(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


# Annotations for fields. allowed.py reads the last member: the words for what the field allows.
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(json_schema_extra={"allowed": BYTES_FORM})]
Seconds = Annotated[float, BeforeValidator(parse_seconds), Field(json_schema_extra={"allowed": SECONDS_FORM})]
FromList = BeforeValidator(_tuple_of_list)  # in Annotated[tuple[X, ...], FromList]: turns a YAML sequence into a tuple
