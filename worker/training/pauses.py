"""What a run does between two steps: it tests its model, and publishes it.

Neither changes anything that the next step depends on. Where workers meet, all of them pause together; else the first
one works alone, and those who wait for its steps wait meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TypeAlias

import torch
from torch import nn

from ...proto.config.job import JobConfig
from ...proto.process.lone_work import lone_work
from ..data import ClickReader, NamedBatch
from .evaluation import Evaluation, evaluate
from .evaluation_times import EvaluationTimes
from .loss_spikes import LossSpikes
from .process_group import WorkerGroup
from .publication_times import PublicationTimes
from .sample_share import Due
from .task_outputs import TaskOutputs
from .training_backend import TrainingBackend
from .training_checkpoints import Progress
from .training_report import EvaluationPoint, Observer

MOST_POINTS = 10_000  # tests within epochs of which a run keeps the results
Place: TypeAlias = Callable[[NamedBatch], NamedBatch]


class Pauses:
    """The pauses of a run on one worker.

    Args:
        job: the job.
        group: this worker and its peers.
        backend: the backend that holds the tables.
        model: the model, without DDP.
        test_reader: reads the test files.
        outputs: the tasks of the model.
        place: brings a batch to the device of the model.
        observer: is informed of tests.
        watermark: returns the time up to which events are read; see :class:`PublicationTimes`.
        model_on_host: returns the model of now on the host; all processes call it.
        publish: publishes it; only the first process calls it. None: nothing is published.

    Attributes:
        spikes: looks for losses that jump.
    """

    def __init__(
        self,
        job: JobConfig,
        group: WorkerGroup,
        *,
        backend: TrainingBackend,
        model: nn.Module,
        test_reader: ClickReader[NamedBatch],
        outputs: TaskOutputs,
        place: Place,
        observer: Observer,
        watermark: Callable[[], int | None],
        model_on_host: Callable[[], nn.Module],
        publish: Callable[[nn.Module], None] | None,
    ) -> None:
        self._job, self._group, self._backend, self._model = job, group, backend, model
        self._test_reader, self._outputs, self._place, self._observer = test_reader, outputs, place, observer
        self._model_on_host, self._publish = model_on_host, publish
        self._tests = EvaluationTimes(job.train, group)
        self._publications = PublicationTimes(job.publish, group, watermark)
        self.spikes = LossSpikes(job.train.spike, group)

    def restart(self) -> None:
        """Begins to count the time to the next test, when an epoch begins, as there is one at its end."""
        self._tests.restart()

    @property
    def due(self) -> Due | None:
        """What this worker finds due after the next step; None: no worker of the job asks."""
        is_published = self._publish is not None and self._publications.is_asked
        if not (self._tests.by_clock or is_published or self.spikes.is_asked):
            return None
        return Due(self._tests.is_over, is_published and self._publications.is_due, self.spikes.is_due)

    def is_test_due(self, number: int, due: Due) -> bool:
        """Returns whether this worker tests the model now.

        Args:
            number: the number of steps of the run so far.
            due: what the workers agreed on in the last of them.
        """
        return self._tests.is_due(number, is_over=due.test)

    def test(self, epoch: int, number: int, progress: Progress) -> EvaluationPoint:
        """Tests the model, and notes the result.

        Args:
            epoch: the present epoch.
            number: the number of steps of the run so far.
            progress: the position of the run, which gets the result.
        """
        self._settle()
        tested = self.tested(epoch)
        samples = (
            self._group.total(progress.samples) if self._group.meets else progress.samples_of_all(self._group.world)
        )
        point = EvaluationPoint(epoch, number, samples, tested.auc, tested.log_loss, dict(tested.metrics))
        progress.points.append(asdict(point))
        del progress.points[:-MOST_POINTS]  # because a stream has no end
        progress.is_tested = True
        self._observer.point(point)
        self._tests.restart()
        return point

    def tested(self, epoch: int) -> Evaluation:
        """Evaluates the model on the test files."""
        self._observer.evaluating(epoch)
        with self._same_numbers(), self._alone() as placed:
            tested = evaluate(
                self._model,
                self._test_reader,
                self._group,
                self._outputs,
                self._job.metrics,
                placed,
                forwards_meet=self._backend.forwards_meet,
            )
        if (session := self._backend.session) is not None:
            session.core.notes.note_test(*tested.shown)
        return tested

    def publish(self) -> None:
        """Publishes the model of now. All workers call it where they meet, and else the first one."""
        self._settle()
        with self._same_numbers(), self._alone():
            model = self._model_on_host()
            if self._publish is not None and self._group.is_first:
                with lone_work.doing("publication of the model"):
                    self._publish(model)
            self._group.wait("publication of the model")
        self._publications.restart()

    def _settle(self) -> None:
        """Waits until the rows and the model are those after the last step."""
        if (session := self._backend.session) is not None:
            session.flush()  # because rows are read that are there, without the clock
        self._group.wait("last steps of all workers")
        self._backend.settle(is_end=False)

    def _same_numbers(self) -> contextlib.AbstractContextManager[None]:
        """Draws the same numbers after the block, because a forward may draw some in eval mode as well."""
        device = self._group.device
        return torch.random.fork_rng([device] if device.type == "cuda" else [])

    @contextlib.contextmanager
    def _alone(self) -> Iterator[Place]:
        """Gives what places the batches of an evaluation; workers that wait for this one's steps wait meanwhile."""
        session = None if self._group.meets else self._backend.session
        if session is None:
            yield self._place
            return

        def placed(batch: NamedBatch) -> NamedBatch:
            session.core.notes.note_work(True)
            return self._place(batch)

        session.core.notes.note_work(True)
        try:
            yield placed
        finally:
            session.core.notes.note_work(False)
