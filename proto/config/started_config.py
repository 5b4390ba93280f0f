"""The options of a run that starts from another one, which the sections ``checkpoint`` and ``elastic`` have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from ..checkpoint.accepted import check_accepted
from ..errors import InvalidArgument
from ..options.strict_model import FromList

TOWER = "tower"  # among what a job accepts

Accepted: TypeAlias = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], FromList]


def start_from_field(what: str) -> Any:
    """Returns the field ``start_from``; ``what`` is a sentence that says what the run begins with."""
    return Field(
        None,
        min_length=1,
        description="Folder of another run's checkpoints, by path or URL, or one of them (FOLDER/save-000003; else the "
        f"newest); or the version that an alias or a number names in publish.root (ctr@live). {what} "
        "`sparserow train --from` sets it. null: it begins anew.",
        json_schema_extra={"allowed": "a path, a URL or NAME@ALIAS"},
    )


def accepted_field() -> Any:
    """Returns the field ``accept``."""
    return Field(
        (),
        description="What may differ from start_from: TABLE.dim (wider; new columns are initial, the optimizer's state "
        "begins anew), TABLE.dtype (weights are rounded), TABLE.optimizer (its state begins anew), with * for every "
        "table; tower: tower and dense optimizer begin anew. `sparserow train --accept` sets it.",
        json_schema_extra={"allowed": "TABLE.dim, TABLE.dtype, TABLE.optimizer, tower"},
    )


def check_start(start_from: str | None, accept: Sequence[str], url: str | None) -> None:
    """Checks where a run starts from, and what it accepts.

    Args:
        start_from, accept: the options of those names.
        url: the folder of the run's own saves; None: it has none.

    Raises:
        InvalidArgument: they do not fit; the text names the option.
    """
    if start_from is not None and url is not None and f"{start_from.rstrip('/')}/".startswith(f"{url.rstrip('/')}/"):
        raise InvalidArgument(f"start_from: {start_from} is of url, where --resume goes on; name another folder")
    if accept and start_from is None:
        raise InvalidArgument("accept: has no effect without start_from")
    check_accepted([each for each in accept if each != TOWER], "accept")
