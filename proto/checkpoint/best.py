"""The note of the best checkpoint of a run, beside its checkpoints; that checkpoint is not removed with older ones."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated

from pydantic import Field, TypeAdapter

from ..documents import Count, Text, checked, parse_json
from ..errors import DataLoss, NotFound
from .entries import CheckpointName
from .folder import Folder

BEST_FILE = "best.json"
_MOST_BYTES = 4096


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint of the best evaluation of a run.

    Attributes:
        name: the name of the checkpoint.
        epoch: the epoch after or within which the model was evaluated.
        metric: the name of the metric, as TASK.METRIC.
        value: its value.
        step: the number of steps of the run before the evaluation; 0: that is not known.
    """

    name: CheckpointName
    epoch: Count
    metric: Text
    value: Annotated[float, Field(allow_inf_nan=False)]
    step: Count = 0


_BEST = TypeAdapter(BestCheckpoint)


def note_best(folder: Folder, best: BestCheckpoint) -> None:
    """Writes the note, in place of an earlier one.

    Raises:
        FailedPrecondition, ResourceExhausted: the note cannot be written.
    """
    folder.put(BEST_FILE, json.dumps(asdict(best)).encode())


def best_in(folder: Folder) -> BestCheckpoint | None:
    """Returns what the note of a folder says; None when there is none, or it is damaged."""
    try:
        return checked(_BEST, parse_json(folder.read_small(BEST_FILE, _MOST_BYTES), BEST_FILE, _MOST_BYTES), BEST_FILE)
    except (NotFound, DataLoss):
        return None


def forget_best(folder: Folder) -> None:
    """Removes the note; the call is harmless when there is none.

    Raises:
        FailedPrecondition: the note cannot be removed.
    """
    folder.delete(BEST_FILE)
