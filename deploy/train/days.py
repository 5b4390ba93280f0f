"""Trains day after day (``data.days``): each day is a run that begins with what the day before has learnt.

The checkpoints of a day lie in a folder of its date below ``train.checkpoint.url``, with a file that says when the day
is done. So what is killed goes on in the middle of its day. When a day is done, the checkpoints of the day before are
removed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from ...proto.checkpoint.folder import Folder
from ...proto.checkpoint.manifest import list_names
from ...proto.checkpoint.urls import absolute
from ...proto.config.days_config import DaysConfig
from ...proto.config.job import JobConfig
from ...proto.errors import FailedPrecondition, NotFound
from ...worker.data.storage import find_paths
from ...worker.training.run_identity import ROWS_FOLDER
from ...worker.training.training_report import TrainResult
from .training_job import run_job

__all__ = ["DayResult", "run_days"]

_DONE = "day.json"
_SETTING = "data.days.path"


@dataclass(frozen=True)
class DayResult:
    """The result of a day's run."""

    day: date
    result: TrainResult


def run_days(
    job: JobConfig, trace_file: Path | None = None, *, resume: str, note: Callable[[str], None]
) -> Iterator[DayResult]:
    """Trains the days that are not done yet, and yields the result of each.

    Args:
        job: the job, with ``data.days``.
        trace_file: as of :func:`run_job`; that of the last day stays.
        resume: "auto" goes on where an earlier run has come to; "never" begins, and refuses days of an earlier run.
        note: shows a line about what follows.

    Raises:
        FailedPrecondition: there are days of an earlier run, and ``resume`` is "never".
        NotFound: the first day is not there.
        SparserowError: as of :func:`run_job`.
    """
    days, checkpoint = job.data.days, job.train.checkpoint
    assert days is not None
    assert checkpoint is not None  # as rules say
    url, day, before, trained = absolute(checkpoint.url), days.first, checkpoint.start_from, 0
    while days.last is None or day <= days.last:
        folder = Folder(f"{url}/{day.isoformat()}")
        is_begun = bool(list_names(folder))
        if is_begun and resume == "never" and not trained:
            raise FailedPrecondition(
                f"train.checkpoint.url: {checkpoint.url} has checkpoints of {day} of an earlier run; go on from there "
                "(--resume auto), or name another url"
            )
        if not folder.exists(_DONE):
            tests = (days.next(day),) if job.data.test is None else ()
            lacking = _awaited(days, (day, *tests), note)
            if lacking is not None:
                if not trained and not is_begun and day == days.first:
                    raise NotFound(f"{_SETTING}: {days.files_of(lacking)}: the files of {lacking} are not there")
                note(f"the run ends before {day}: the files of {lacking} are not there ({days.files_of(lacking)})")
                return
            note(f"{day}: training on {days.files_of(day)}")
            result = run_job(job.of_day(day, url=folder.url, before=before), trace_file=trace_file, resume="auto")
            folder.put(_DONE, json.dumps({"day": day.isoformat(), "test_auc": result.test_auc}).encode())
            trained += 1
            if before != checkpoint.start_from:
                _forget(Folder(absolute(before or "")))
            yield DayResult(day, result)
        before, day = folder.url, days.next(day)


def _forget(folder: Folder) -> None:
    """Removes the checkpoints of a day, which no later one needs; that it is done stays known."""
    for each in (folder, folder / ROWS_FOLDER):
        for name in reversed(list_names(each)):  # newest first: later checkpoints may build on earlier ones
            (each / name).remove()


def _awaited(days: DaysConfig, wanted: tuple[date, ...], note: Callable[[str], None]) -> date | None:
    """Waits for days where the job says so; returns one that is not there, None when all are."""
    is_said = False
    while True:
        lacking = next((day for day in wanted if not _is_there(days, day)), None)
        if lacking is None or days.on_missing == "end":
            return lacking
        if not is_said:
            note(f"waiting for the files of {lacking} ({days.files_of(lacking)})")
            is_said = True
        time.sleep(days.look_every)


def _is_there(days: DaysConfig, day: date) -> bool:
    try:
        (path, *_) = find_paths((days.files_of(day),), _SETTING)
        if days.marker is not None:
            find_paths((f"{path.rpartition('/')[0]}/{days.marker}",), _SETTING)
    except NotFound:
        return False
    return True
