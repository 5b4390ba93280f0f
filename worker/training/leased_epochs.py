"""Results of epochs whose data was leased; they cover all workers of a run, also killed ones and late ones."""

from __future__ import annotations

import math
import sys
from typing import TypeAlias

from ..data import NamedBatch
from ..data.leased import EpochScore, LeasedReader, Trained
from ..data.stream_reader import StreamReader
from .training_checkpoints import Progress
from .training_report import EpochResult

# What reads data that the coordinator leases.
Leasing: TypeAlias = LeasedReader[NamedBatch] | StreamReader[NamedBatch]


def trained(progress: Progress) -> Trained:
    """Returns this worker's sums over the epoch so far."""
    return Trained(progress.samples, progress.samples, progress.loss_sum, progress.seconds)


def is_known(reader: Leasing) -> bool:
    """Returns whether the coordinator has reported the sums of the epoch that ended last."""
    return reader.end is not None and reader.end.trained is not None


def was_tested(reader: Leasing) -> bool:
    """Returns whether a worker has evaluated the epoch that ended last."""
    return reader.end is not None and reader.end.tested is not None


def is_past(reader: Leasing, *, is_last: bool) -> bool:
    """Returns whether the epoch that ended last needs no more work: it was tested, or a later one is under way."""
    return was_tested(reader) or (reader.came_late and not is_last)


def metrics_of(task: str, auc: float, log_loss: float) -> dict[str, float]:
    """Returns the metrics of an epoch that the coordinator keeps, by ``TASK.METRIC``; {} for an epoch without a test.

    Args:
        task: the name of the task that is shown.
        auc: its AUC on the test files.
        log_loss: its log loss on the test files, in nats.
    """
    return {} if math.isnan(log_loss) else {f"{task}.auc": auc, f"{task}.log_loss": log_loss}


def known_result(reader: Leasing, epoch: int, world: int, task: str) -> EpochResult | None:
    """Returns the result of the epoch that ended last, as the coordinator reports it.

    Args:
        reader: the reader of that epoch.
        epoch: the number of the epoch.
        world: the present number of workers. ``samples_per_sec`` is their mean rate times this number, unless the
            epoch was tested and so has a rate.
        task: the name of the task that is shown.

    Returns:
        The result, with NaN as ``test_auc`` when the epoch was not tested; None when the coordinator has no sums.
    """
    end = reader.end
    if end is None or end.trained is None:
        return None
    sums, tested = end.trained, end.tested
    loss = sums.loss_sum / max(sums.measured, 1)
    if tested is not None:
        metrics = metrics_of(task, tested.auc, tested.log_loss)
        return EpochResult(epoch, loss, sums.samples, tested.samples_per_sec, tested.auc, tested.log_loss, metrics)
    rate = sums.samples * world / sums.seconds if sums.seconds else 0.0
    return EpochResult(epoch, loss, sums.samples, rate, math.nan, math.nan)


def keep_untested(reader: Leasing, result: EpochResult) -> None:
    """Reports to the coordinator that the epoch that ended last stays without a test, so that it is reported once."""
    reader.report_tested(EpochScore(result.samples_per_sec, math.nan, math.nan))


def show_all_done(epochs: int) -> None:
    """Prints to stderr that the run had ended before this worker joined."""
    print(f"sparserow: all {epochs} epochs of this run were done before; nothing is left to train", file=sys.stderr)
