"""Results of epochs whose data was leased: of all workers of a run, those that were killed or came later included."""

from __future__ import annotations

import math
import sys

from ..data.leased import LeasedReader, Trained
from .training_checkpoints import Progress
from .training_report import EpochResult


def trained(progress: Progress) -> Trained:
    """What this worker did in the epoch so far."""
    return Trained(progress.samples, progress.samples, progress.loss_sum, progress.seconds)


def is_known(reader: LeasedReader) -> bool:
    """Whether the coordinator has the figures of the epoch that ended last; one of the version before has none."""
    return reader.end is not None and reader.end.trained is not None


def was_tested(reader: LeasedReader) -> bool:
    """Whether a worker has evaluated the epoch that ended last."""
    return reader.end is not None and reader.end.tested is not None


def is_past(reader: LeasedReader, *, is_last: bool) -> bool:
    """Whether nothing is left to do for the epoch that ended last: it was tested, or a later one is under way."""
    return was_tested(reader) or (reader.came_late and not is_last)


def known_result(reader: LeasedReader, epoch: int, world: int) -> EpochResult | None:
    """The epoch that ended last, as the coordinator knows it.

    Args:
        reader: whose epoch it was.
        epoch: its number.
        world: workers of now, whose mean speed gives ``samples_per_sec`` where the epoch was not told before.

    Returns:
        None where the coordinator does not know; ``test_auc`` is NaN where the epoch was not tested.
    """
    end = reader.end
    if end is None or end.trained is None:
        return None
    sums, tested = end.trained, end.tested
    loss = sums.loss_sum / max(sums.measured, 1)
    if tested is not None:
        return EpochResult(epoch, loss, sums.samples, tested.samples_per_sec, tested.auc, tested.log_loss)
    rate = sums.samples * world / sums.seconds if sums.seconds else 0.0
    return EpochResult(epoch, loss, sums.samples, rate, math.nan, math.nan)


def tell_all_done(epochs: int) -> None:
    """Says that the run was over when this worker came."""
    print(f"sparserow: all {epochs} epochs of this run were done before; nothing is left to train", file=sys.stderr)
