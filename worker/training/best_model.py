"""Keeps the model of the best test of a run (``metrics.best``) in a checkpoint, and brings it back at the end."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from ...proto.checkpoint.best import BestCheckpoint, best_in, forget_best, note_best
from ...proto.checkpoint.manifest import list_names
from ...proto.errors import FailedPrecondition, SparserowError
from .early_stop import goodness
from .process_group import WorkerGroup
from .training_checkpoints import Progress, TrainingCheckpoints
from .training_report import Evaluated

log = logging.getLogger(__name__)

_SETTING = "metrics.best"


class BestModel:
    """The best model of a run so far. Every rank of the group makes one, and calls its methods in the same order.

    A note beside the checkpoints (``proto/checkpoint/best.py``) names the best one, so that no save removes it, and a
    run that goes on knows it. A run that was killed between a checkpoint and its note finds out when it goes on from
    that checkpoint, which holds the rows of the last test before it.

    Args:
        metric: the metric, as TASK.METRIC.
        checkpoints: the checkpoints of the run.
        group: this worker and its peers.

    Attributes:
        kept: the best checkpoint; None: there is none yet.
    """

    def __init__(self, metric: str, checkpoints: TrainingCheckpoints, group: WorkerGroup) -> None:
        self._metric, self._checkpoints, self._group = metric, checkpoints, group
        self.kept: BestCheckpoint | None = None
        self._goodness = math.nan

    def begin(self, progress: Progress, evaluations: Sequence[Evaluated]) -> None:
        """Takes over the best checkpoint of the run that this one goes on from.

        A note is taken over when it is of one of the evaluations, with the same value; else the best model is one of
        those to come, or that of the checkpoint that the run goes on from where that was just evaluated.

        Args:
            progress: the position of the run.
            evaluations: the results of the tests before, in their order.
        """
        noted = self._group.share(self._noted() if self._group.is_first else None, what="best model")
        by_place = {(result.epoch, result.step): result for result in evaluations}
        if noted is not None and noted.metric == self._metric and (noted.epoch, noted.step) in by_place:
            result = by_place[noted.epoch, noted.step]
            if result.metrics.get(self._metric) == noted.value:
                self.kept, self._goodness = noted, goodness(_SETTING, self._metric, result)
        name = self._checkpoints.resumed
        # Because worker 0 alone has the samples of a run that had another number of workers.
        is_new = self._group.share(progress.samples == 0, what="best model")
        was_evaluated = progress.is_tested or (is_new and not progress.is_trained)
        if name is None and self._group.is_first:
            forget_best(self._checkpoints.folder)
        elif name is not None and was_evaluated and evaluations and self._is_better(evaluations[-1]):
            self._keep(evaluations[-1], name)

    def _noted(self) -> BestCheckpoint | None:
        folder = self._checkpoints.folder
        noted = best_in(folder)
        return noted if noted is not None and noted.name in list_names(folder) else None

    def add(self, result: Evaluated, progress: Progress) -> None:
        """Keeps the model in a checkpoint when it is better than those before.

        Args:
            result: the result of the test, whose rows and dense weights are those of now.
            progress: the position of the run: within an epoch, or at the beginning of the next one.

        Raises:
            InvalidArgument: the test has no such metric.
        """
        if not self._is_better(result):
            return
        name = self._checkpoints.save_now(progress)
        if name is None:
            log.warning("%s: the model of epoch %d is not kept, as it could not be saved", _SETTING, result.epoch)
        else:
            self._keep(result, name)

    def _is_better(self, result: Evaluated) -> bool:
        value = goodness(_SETTING, self._metric, result)
        return not math.isnan(value) and (math.isnan(self._goodness) or value > self._goodness)

    def _keep(self, result: Evaluated, name: str) -> None:
        best = BestCheckpoint(name, result.epoch, self._metric, result.metrics[self._metric], result.step)
        problem: SparserowError | None = None
        if self._group.is_first:
            try:
                note_best(self._checkpoints.folder, best)
            except SparserowError as error:
                problem = error
        if (problem := self._group.share(problem, what="best model")) is not None:
            log.warning("%s: the model of epoch %d is not kept: %s", _SETTING, result.epoch, problem)
            return
        self.kept, self._goodness = best, goodness(_SETTING, self._metric, result)

    def bring_back(self, evaluations: Sequence[Evaluated]) -> None:
        """Sets rows and model back to the best checkpoint, unless they are those of it.

        Args:
            evaluations: the results of all tests of the run, which is over, in their order.

        Raises:
            FailedPrecondition: no checkpoint was kept, or it cannot be restored.
        """
        best = self.kept
        if best is None:
            raise FailedPrecondition(
                f"{_SETTING}: no model was kept; {self._metric} was no number, or no save succeeded"
            )
        if evaluations and (best.epoch, best.step) == (evaluations[-1].epoch, evaluations[-1].step):
            return
        try:
            self._checkpoints.load(best.name)
        except SparserowError as error:
            raise FailedPrecondition(
                f"{_SETTING}: the best model, that of epoch {best.epoch}, could not be restored: {error}. It stays in "
                f"the checkpoint {best.name}"
            ) from error
