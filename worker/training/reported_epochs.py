"""Reports each epoch of a run once, also where workers are restarted or share the epochs' data by leases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...proto.config.job import JobConfig
from ..data.leased import EpochScore
from . import leased_epochs
from .epoch_file import EpochFile
from .process_group import WorkerGroup
from .training_backend import TrainingBackend
from .training_report import EpochResult, Observer


class ReportedEpochs:
    """The results of a run's epochs that were reported, before a restart of the run as well.

    Args:
        job: the job.
        group: this worker and its peers.
        backend: the backend that holds the tables.
        observer: gets the results.
        leased: the reader of leased data; None: each worker has data of its own.
        shown_task: the name of the task whose metrics leases keep.
        file: keeps the results beside the checkpoints of the run; None: the run has no checkpoints.
    """

    def __init__(
        self,
        job: JobConfig,
        group: WorkerGroup,
        *,
        backend: TrainingBackend,
        observer: Observer,
        leased: leased_epochs.Leasing | None,
        shown_task: str,
        file: EpochFile | None,
    ) -> None:
        self._job, self._group, self._backend, self._observer = job, group, backend, observer
        self._leased, self._shown_task, self._file = leased, shown_task, file
        self._results: dict[int, EpochResult] = {}

    def read(self) -> None:
        """Reads what was reported before this run goes on from a checkpoint. Every rank calls it."""
        if self._file is not None:
            self._results = self._group.share(self._file.read() if self._group.rank == 0 else {})

    def __contains__(self, epoch: int) -> bool:
        """Whether the result of an epoch is known."""
        return epoch in self._results

    def keep(self, results: Sequence[EpochResult]) -> None:
        """Writes results to the folder of checkpoints, so that a restarted worker 0 has them.

        Args:
            results: the results.
        """
        if self._file is not None and self._group.is_first:
            self._results.update({result.epoch: result for result in results})
            self._file.write(self._results.values())

    def is_past(self, epoch: int, *, rows_are_its: bool) -> bool:
        """Returns whether an epoch is not to be evaluated, as a worker has reported it or it can no longer be reported.

        The last epoch gives the result of the run, so its report must be about the rows that there are now. With
        ``metrics.best`` any epoch may.

        Args:
            epoch: the number of the epoch.
            rows_are_its: whether the rows are those after the last epoch.
        """
        train, leased = self._job.train, self._leased
        is_last = epoch == train.epochs or self._job.metrics.best is not None
        if leased is None:
            return epoch in self._results and (not is_last or rows_are_its or train.staleness == 0)
        return self._group.total(int(not leased_epochs.is_past(leased, is_last=is_last))) == 0

    def before(self, epoch: int) -> list[EpochResult]:
        """Returns the known result of an epoch that was reported before.

        With leased data only worker 0 returns it, since the other workers report nothing.

        Args:
            epoch: the number of the epoch, for which :meth:`is_past` holds.
        """
        is_last, leased = epoch == self._job.train.epochs, self._leased
        if is_last:
            self._backend.settle(is_end=True)  # then the model is that at the end of the run
        if leased is None:
            return [self._results[epoch]]
        known = (
            leased_epochs.known_result(leased, epoch, self._group.world, self._shown_task)
            if self._group.rank == 0
            else None
        )
        if known is None:
            return []
        if not leased_epochs.was_tested(leased):  # worker 0 was restarted before it could test this epoch
            leased_epochs.keep_untested(leased, known)
            self._observer.epoch(known)
        if is_last:
            leased_epochs.show_all_done(epoch)
        return [known]

    def report(self, result: EpochResult) -> list[EpochResult]:
        """Reports the result of an epoch that ended now.

        Args:
            result: the result of this worker.

        Returns:
            The result when it counts for all workers; else [].
        """
        counts = True
        if self._leased is not None and leased_epochs.is_known(self._leased):
            counts = self._group.rank == 0  # the result of worker 0 covers the samples of all workers
            if counts:
                self._leased.report_tested(EpochScore(result.samples_per_sec, result.test_auc, result.test_log_loss))
                kept = leased_epochs.metrics_of(self._shown_task, result.test_auc, result.test_log_loss)
                result = replace(result, metrics=kept)  # a worker that is restarted knows no others
        self.keep([result])
        self._observer.epoch(result)  # after it was kept, so that a killed worker reports an epoch at most once
        return [result] if counts else []
