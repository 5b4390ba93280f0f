"""How delimited text writes its fields, in a job file and in the features that are published with a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from ..errors import InvalidArgument
from .document import describe_error
from .strict_model import FromList, StrictModel

_CHARACTER = r"^[\x00-\x7f]$"
_OPTIONAL_CHARACTER = r"^[\x00-\x7f]?$"


class CsvDialect(StrictModel):
    """The names of the columns of delimited text, and how a line writes their fields."""

    columns: Annotated[tuple[str, ...], FromList] = Field(
        (), description="Names of all columns in file order; empty: the names in the header, or column_0, column_1, ..."
    )
    header: bool = Field(False, description="Whether the first line of each file is a header.")
    delimiter: str = Field(
        ",",
        pattern=_CHARACTER,
        description="Character between the fields of a line.",
        json_schema_extra={"allowed": "one ASCII character"},
    )
    list_delimiter: str = Field(
        "|",
        pattern=_CHARACTER,
        description="Character between the elements of a field that a feature of kind multi_hot or sequence reads.",
        json_schema_extra={"allowed": "one ASCII character"},
    )
    quote: str = Field(
        "",
        pattern=_OPTIONAL_CHARACTER,
        description="Character around fields that contain delimiters; empty: none.",
        json_schema_extra={"allowed": "one ASCII character, or empty"},
    )
    comment: str = Field("", description="A line that begins with this text is skipped; empty: none.")
    trim: bool = Field(False, description="Whether spaces around a field are dropped.")
    missing: Annotated[tuple[str, ...], FromList] = Field(
        (), description="Texts that mean a missing value, besides the empty field."
    )

    @model_validator(mode="after")
    def _delimiters_differ(self) -> CsvDialect:
        if self.list_delimiter == self.delimiter and not self.quote:
            raise InvalidArgument("list_delimiter: is that of the fields of a line, so that lists need a quote")
        return self

    def changed(self, options: Mapping[str, Any]) -> CsvDialect:
        """Returns the dialect with other values of some options.

        Raises:
            InvalidArgument: a value is not allowed; the text names the option.
        """
        try:
            return CsvDialect.model_validate({**self.model_dump(), **options})
        except ValidationError as error:
            raise InvalidArgument(
                describe_error(CsvDialect, error.errors()[0]).removeprefix("the document: ")
            ) from None
