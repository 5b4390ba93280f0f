"""What the kinds of features have in common: a name, one or more columns, and the options that make keys of tokens."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import Field, ValidationError, model_validator

from ..errors import InvalidArgument
from ..options.document import describe_error
from ..options.path_text import PathText
from ..options.strict_model import StrictModel

MOST_KEYS = 1 << 62
_NAME = r"^[A-Za-z_][A-Za-z0-9_]{0,127}$"
_NAME_FORM = "a name of letters, digits and _, at most 128, that does not begin with a digit"

CellKind: TypeAlias = Literal["text", "number", "texts", "numbers"]


class Feature(StrictModel):
    """The base of every kind. ``IdFeature("user", column="user_id")`` makes one.

    Args:
        given: the name of the feature.
        options: the attributes of its class.

    Attributes:
        name: the name of the feature, and of the tensor that the model takes.

    Raises:
        InvalidArgument: an option is unknown, of a wrong type or out of range; the text names it.
    """

    name: str = Field(pattern=_NAME, description="Name of the tensor.", json_schema_extra={"allowed": _NAME_FORM})

    def __init__(self, given: str | None = None, /, **options: Any) -> None:
        try:
            super().__init__(**options if given is None else {"name": given, **options})
        except ValidationError as error:
            text = describe_error(type(self), error.errors()[0]).removeprefix("the document: ")
            raise InvalidArgument(text) from None

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that the feature reads."""
        column: str | None = getattr(self, "column", None)
        return (self.name if column is None else column,)

    @property
    def cells(self) -> dict[str, CellKind]:
        """What a cell of each column is: a text, a number, or a list of them; an integer counts as a text."""
        return dict.fromkeys(self.columns, "text")

    @property
    def needs_statistics(self) -> bool:
        """Whether a pass over the training data must find something before the feature can be computed."""
        return False


class OneColumn(Feature):
    """The base of kinds that read one column.

    Attributes:
        column: the name of the column; None: the name of the feature.
        on_null: what a null becomes: "default" takes ``default``, "refuse" ends the read with an error.
    """

    column: str | None = Field(None, min_length=1, description="Column; null: the feature's name.")
    on_null: Literal["default", "refuse"] = Field(
        "default", description="default: a null takes the feature's default. refuse: it is an error."
    )


class HashUnknown(StrictModel):
    """Tokens that a vocabulary does not have share ``hash`` rows, chosen by their hash."""

    hash: int = Field(ge=1, le=1 << 32, description="Number of rows that unknown tokens share.")


class KeyOptions(StrictModel):
    """The options that turn a token into a key.

    Attributes:
        table: the name of the table that the keys look up; None: the name of the feature.
        modulo: the keys are taken modulo this number; None: they have 63 bits.
        vocabulary: a file with a token on each line. The key of a token is the number of its line, from 0, plus
            ``unknown_rows``, so that a line at the end changes no other key. None: the key of a token is its hash
            (``proto/row_keys.py``).
        unknown: what a token becomes that the vocabulary does not have: "row": the key 0, which all of them share.
            {"hash": n}: one of the keys below n. "refuse": an error.
        default: the token of a null.
    """

    table: str | None = Field(None, min_length=1, description="Table of the keys; null: the feature's name.")
    modulo: int | None = Field(None, ge=1, le=MOST_KEYS, description="Keys are taken modulo this; null: 63 bits.")
    vocabulary: PathText | None = Field(
        None, min_length=1, description="File with a token on each line, whose number gives its key; null: hashed keys."
    )
    unknown: Literal["row", "refuse"] | HashUnknown = Field(
        "row",
        description="What tokens become that the vocabulary does not have: one row for all, {hash: n} rows, or refuse.",
    )
    default: str | int = Field("", description="Token of a null.")

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> KeyOptions:
        if self.vocabulary is None and "unknown" in self.model_fields_set:
            raise InvalidArgument("unknown: has no effect without vocabulary")
        if self.vocabulary is not None and self.modulo is not None:
            raise InvalidArgument("modulo: has no effect with vocabulary, whose keys are the numbers of its lines")
        return self

    @property
    def unknown_rows(self) -> int:
        """The number of keys, from 0, that tokens share which the vocabulary does not have; 0 without a vocabulary."""
        if self.vocabulary is None or self.unknown == "refuse":
            return 0
        return self.unknown.hash if isinstance(self.unknown, HashUnknown) else 1
