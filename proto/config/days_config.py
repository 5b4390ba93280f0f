"""The section ``data.days`` of a job file: files of one day after another, each trained on by a run of its own."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from ..errors import InvalidArgument
from ..options.path_text import PathText
from ..options.strict_model import Seconds, StrictModel

_MOST_DAYS = 10_000


def _date_of(value: object) -> object:
    try:
        return date.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        return value


Day = Annotated[date, BeforeValidator(_date_of)]


class DaysConfig(StrictModel):
    """Days in place of ``data.train`` and ``data.test``: each is trained on, tested on the next one, and published."""

    path: PathText = Field(
        min_length=1,
        description="Files of a day, by path or URL, in which {day} stands for its date: s3://log/dt={day}/*.parquet.",
        json_schema_extra={"allowed": "a path or a URL with {day}"},
    )
    first: Day = Field(
        description="First day, such as 2026-11-01.", json_schema_extra={"allowed": "a date such as 2026-11-01"}
    )
    last: Day | None = Field(
        None,
        description="Last day; null: as many as there are.",
        json_schema_extra={"allowed": "a date from first on"},
    )
    marker: str | None = Field(
        None,
        min_length=1,
        description="Name of a file, such as _SUCCESS, without which a day's folder is still being written; null: a "
        "day is there once a file of it is.",
    )
    on_missing: Literal["end", "wait"] = Field(
        "end",
        description="What happens where a day, or the next one that it is tested on, is not there. end: the run ends, "
        "and --resume auto goes on there another time. wait: the run waits for it.",
    )
    look_every: Seconds = Field(60.0, gt=0, description="Time between two looks for a day that is waited for.")

    def files_of(self, day: date) -> str:
        """Returns the path of a day's files."""
        return self.path.replace("{day}", day.isoformat())

    def next(self, day: date) -> date:
        """Returns the day after."""
        return day + timedelta(days=1)

    @model_validator(mode="after")
    def _is_a_range(self) -> DaysConfig:
        if "{day}" not in self.path:
            raise InvalidArgument(f"path: {self.path!r} lacks {{day}}, which stands for the date of a day")
        if self.last is not None and not 0 <= (self.last - self.first).days < _MOST_DAYS:
            raise InvalidArgument(
                f"last: {self.last} is not allowed; allowed: up to {_MOST_DAYS} days from {self.first} on"
            )
        return self
