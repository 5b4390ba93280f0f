"""What a run restores of a checkpoint beside the rows, and how errors and results are worded for jobs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from ...proto.errors import FailedPrecondition
from ..api.session import Session
from ..checkpoint import RestoredCheckpoint
from ..checkpoint.save import Stateful
from .learning_rates import LearningRates
from .progressive import ProgressiveMetrics

FROM = "--from"
_CHANGES = ("is in accept", "build the same model")


@dataclass(frozen=True)
class TrainedParts:
    """The parts of a trainer that a checkpoint holds besides the rows.

    Attributes:
        model: the model, without DDP.
        optimizer: the optimizer of the dense tower; None: the tower is on the servers.
        scaler: the scaler of the loss; None: the loss is not scaled.
        schedule: the schedules of the learning rates.
        reader: the reader of the training files.
        steps: the counts of steps and samples.
        progressive: the metrics of the training samples by windows; None: there are none.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    scaler: GradScaler | None
    schedule: LearningRates
    reader: Stateful
    steps: Stateful
    progressive: ProgressiveMetrics | None = None


def restored_parts(
    session: Session,
    parts: TrainedParts,
    url: str,
    name: str,
    *,
    reader: Stateful | None = None,
    accept: Sequence[str] = (),
    strict: bool = True,
    tower: bool = True,
) -> RestoredCheckpoint:
    """Restores a checkpoint with the tower, its optimizer and the schedules.

    Args:
        session: the session of this worker.
        parts: the parts of the trainer.
        url: the URL of the folder.
        name: the name of the checkpoint.
        reader: the reader to set back; None: it stays.
        accept, strict: as of ``session.restore``.
        tower: whether the tower, its optimizer and the scaler are restored.
    """
    restored: RestoredCheckpoint = session.restore(
        url,
        name=name,
        model=parts.model if tower else None,
        optimizer=parts.optimizer if tower else None,
        scaler=parts.scaler if tower else None,
        scheduler=parts.schedule,
        reader=reader,
        accept=accept,
        strict=strict,
    )
    parts.schedule.take_given()
    return restored


@contextlib.contextmanager
def worded_for_jobs(option: str = "--resume") -> Iterator[None]:
    """Has errors for tables that differ name what a job can do: its file has no argument of ``restore``."""
    try:
        yield
    except FailedPrecondition as error:
        problem, _, advice = str(error).removesuffix("; nothing was changed").rpartition("; ")
        if option == FROM and any(words in advice for words in _CHANGES):
            what = f"{advice} (--accept, or train.checkpoint.accept)"
            if advice == "build the same model":
                what = f"{advice}, or let the tower begin anew (--accept tower)"
            raise FailedPrecondition(f"{option}: {problem}; {what}") from error
        if not any(words in advice for words in ("is in accept", "leave the table out")):
            raise
        keys = "train.row_optimizer or tables" if "optimizer" in problem else "model or tables"
        raise FailedPrecondition(
            f"{option}: {problem}; set it in the job file ({keys}) as it was, or begin a new run from it: --from, and "
            "another folder of checkpoints"
        ) from error


def print_once(session: Session, words: str) -> None:
    """Prints to stderr, once in a job, where the run begins."""
    if session.rank == 0 and session.core.leads:
        print(f"sparserow: {words}", file=sys.stderr, flush=True)
