"""Trains the model of a job on its click log, as one worker of a group."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...proto.config.job import JobConfig
from ...proto.errors import FailedPrecondition, InvalidArgument
from ..checkpoint.save import Stateful, absolute
from ..data import NamedBatch
from ..data.leased import LeasedReader
from ..data.sources.feature_columns import feature_set
from ..data.stream_reader import StreamReader
from ..layers.embedding import copy_sharing_rows
from ..models import Tower
from ..publish.program_export import ProgramSource
from ..session.tracing import loaded, trace_allreduce
from . import leased_epochs
from .batch_placement import BatchPlacement
from .best_model import BestModel
from .build_model import build_model
from .data_leases import SessionLeases
from .early_stop import EarlyStop
from .epoch_file import EpochFile
from .evaluation_times import in_order
from .event_sources import stream_reader
from .exported_model import exported
from .files_read import saved_run
from .job_features import published_features
from .job_readers import open_readers
from .model_order import KEY as ORDER, ROWS, TOWER_SHAPES, order_of, rows_of, tower_of
from .parallel_towers import WholeModel, wrapped
from .pauses import MOST_POINTS, Pauses
from .process_group import WorkerGroup
from .progressive import ProgressiveMetrics
from .recent_samples import RecentSamples
from .reported_epochs import ReportedEpochs
from .run_identity import RunIdentity
from .run_restore import TrainedParts
from .started_run import start_rows
from .task_outputs import TaskOutputs
from .training_backend import TrainingBackend
from .training_checkpoints import Progress, TrainingCheckpoints, resume_rows
from .training_device import out_of_memory
from .training_report import EpochResult, Evaluated, EvaluationPoint, Observer, TrainResult
from .training_step import StepResult, TrainingStep

_log = logging.getLogger(__name__)
_OBSERVE_EVERY_SEC = 0.5


class Trainer:
    """One run of a job on one worker; every rank makes one. A trainer runs once.

    Args:
        job: the job to train. The size of ``group`` is used in place of ``job.train.workers``.
        group: this worker and its peers.
        backend: the backend that holds the tables.
        observer: is informed of the progress.
        run: the name of the run, for the leases of ``train.elastic``; all workers of a run give the same name.
        identity: the identity of the run, for its checkpoints; None: a new one.
        resume: "never"; "auto", to begin at the newest checkpoint if there is one; or the name of a checkpoint.
        publish: publishes the model of now while the run goes on; only the first process calls it, with the model on
            the host. None: the job has no ``publish.every``, or no cluster.

    Attributes:
        is_resumed: whether the run has gone on from a checkpoint.

    Raises:
        SparserowError: a file cannot be read, or a setting is not allowed.
    """

    def __init__(
        self,
        job: JobConfig,
        *,
        group: WorkerGroup,
        backend: TrainingBackend,
        observer: Observer,
        run: str = "",
        identity: RunIdentity | None = None,
        resume: str = "never",
        publish: Callable[[Trainer, nn.Module], None] | None = None,
    ) -> None:
        identity = identity or RunIdentity.new()
        self._run_config = identity.config(job)
        self._job, self._group, self._backend, self._observer = job, group, backend, observer
        readers = open_readers(job, group, backend.session, saved_run(job, resume))
        self._readers, self._train_reader, self._test_reader = readers, readers.train, readers.test
        self._resume, self.is_resumed, self._is_started_from = resume, False, False
        self._run_config[ORDER] = order_of(job, readers.spec)
        torch.manual_seed(job.train.seed)
        self._bare = backend.build(lambda: build_model(job.model, readers.spec))
        features = feature_set(job.data.features) if job.data.features else None
        self._run_config[ROWS] = rows_of(self._bare, features)
        self._run_config[TOWER_SHAPES] = tower_of(self._bare)
        self._set_activation_checkpointing()
        is_kept = job.publish.folder is not None
        self._whole = WholeModel(self._bare, group) if job.train.parts is not None and is_kept else None
        self._bare.to(group.device)
        self._placement = BatchPlacement(group.device, backend)
        self._model: nn.Module = wrapped(self._bare, job.train, group)
        backend.start(self._bare)
        self._leased = self._leases(run, identity)
        # Where workers meet, they have results of an epoch without the coordinator.
        self._of_all = self._leased if job.train.elastic is not None else None
        self._batches = self._leased or backend.batches(self._train_reader)
        if isinstance(self._model, DistributedDataParallel) and backend.trace.is_recording:
            trace_allreduce(self._model, backend.trace, lambda: self._step.number)
        self._outputs = TaskOutputs(job.all_tasks, job.data.negatives_keep)
        self._step = TrainingStep(job.train, model=self._model, backend=backend, group=group, outputs=self._outputs)
        torch.manual_seed(job.train.seed + group.rank * 1_000_003)  # dropout differs between workers
        self._progress = Progress()
        self._pauses = Pauses(
            job,
            group,
            backend=backend,
            model=self._bare,
            test_reader=self._test_reader,
            outputs=self._outputs,
            place=self._placement.placed,
            observer=observer,
            watermark=lambda: self.watermark,
            model_on_host=partial(self.model_on_host, is_over=False),
            publish=None if publish is None else partial(publish, self),
        )
        progressive = job.metrics.progressive
        self._progressive = (
            None if progressive is None else ProgressiveMetrics(progressive.window, job.train, group, observer.window)
        )
        self._checkpoints = self._made_checkpoints()
        checkpoint = job.train.checkpoint
        self._shown_task = "" if self._outputs.shown is None else self._outputs.shown.name
        self._reported = ReportedEpochs(
            job,
            group,
            backend=backend,
            observer=observer,
            leased=self._of_all,
            shown_task=self._shown_task,
            file=None if checkpoint is None else EpochFile(absolute(checkpoint.url), identity),
        )

    def _set_activation_checkpointing(self) -> None:
        is_checkpointed = self._job.train.activation_checkpointing
        towers = [module for module in self._bare.modules() if isinstance(module, Tower)]
        if is_checkpointed and not towers:
            raise InvalidArgument(
                "train.activation_checkpointing: has no effect, as the model has no Tower of sparserow; call "
                "torch.utils.checkpoint in its forward"
            )
        for tower in towers:
            tower.is_checkpointed = is_checkpointed

    def _leases(self, run: str, identity: RunIdentity) -> leased_epochs.Leasing | None:
        elastic, session = self._job.train.elastic, self._backend.session
        if session is not None and self._job.data.stream is not None:
            return stream_reader(self._job, self._train_reader, session, group=self._group, run=run)
        if elastic is None or session is None:
            return None
        return LeasedReader(
            self._train_reader,
            lease_rows=elastic.lease_rows,
            leases=SessionLeases(
                session,
                run,
                self._job.train.epochs,
                order=self._train_reader.digest(elastic.lease_rows),
                again=identity.is_again,
            ),
            settle=session.flush,
            fills=self._job.train.staleness is not None,
        )

    def _made_checkpoints(self) -> TrainingCheckpoints | None:
        config, session = self._job.train.checkpoint, self._backend.session
        if config is None or session is None:
            return None
        parts = TrainedParts(
            model=self._bare,
            optimizer=self._backend.dense,
            scaler=self._step.scaler,
            schedule=self._step.rates,
            reader=cast(Stateful, self._batches),
            steps=self._step,
            progressive=self._progressive,
        )
        return TrainingCheckpoints(config, session=session, group=self._group, parts=parts, run=self._run_config)

    def _go_on(self) -> None:
        """Restores the checkpoint that the run begins from, on every rank."""
        name = None if self._resume == "auto" else self._resume
        elastic, session = self._job.train.elastic, self._backend.session
        if elastic is not None and elastic.url is not None and session is not None:
            self.is_resumed = resume_rows(session, elastic.url, name, self._run_config)
            return
        if self._checkpoints is None:
            raise FailedPrecondition("--resume: it needs train.checkpoint and model.backend ps")
        progress = self._checkpoints.resume(name)
        self.is_resumed = progress is not None
        is_stream = self._job.data.stream is not None
        if progress is None or (is_stream and progress.is_trained):  # there may be events since a stream's end
            return
        self._progress = progress
        if not is_stream:
            self._reported.read()

    def _start_elastic(self) -> None:
        """Begins an elastic run with the rows of another one, where the job says so."""
        elastic, session = self._job.train.elastic, self._backend.session
        if self.is_resumed or elastic is None or session is None:
            return
        is_stream = self._job.data.stream is not None
        if start_rows(session, elastic, self._run_config, is_stream=is_stream):
            self._is_started_from = True

    def _fit_features(self) -> None:
        """Gives the readers the statistics of the rows; a run that goes on never takes others."""
        policy = "keep" if self.is_resumed or self._is_started_from else self._job.train.features_policy
        self._readers.fit(self._job, self._group, self._backend.session, policy=policy)

    def run(self) -> TrainResult:
        """Trains all epochs, and evaluates the model after each, and within it where the job says so.

        Raises:
            BadLine: a line is malformed, and such lines are not skipped.
            InvalidArgument, NonFiniteGradient: a loss or gradient is not finite, and such steps are not skipped.
            FailedPrecondition: the job has no section train.checkpoint to go on from.
            SparserowError: a server or a peer has failed, or the checkpoint cannot be restored.
        """
        if self._resume != "never":
            self._go_on()
        checkpoint = self._job.train.checkpoint
        if not self.is_resumed and self._checkpoints is not None and checkpoint is not None and checkpoint.start_from:
            self._checkpoints.run_start.take(checkpoint.start_from)
            self._is_started_from = True
        self._start_elastic()
        train, progress = self._job.train, self._progress
        self._warn_of_empty()
        self._fit_features()
        if (session := self._backend.session) is not None and self._step.rates.done == 0:
            # One that joins a running job, or takes the place of another, goes on with the job's clock.
            self._step.rates.begin_at(session.current_step)
        history = [EpochResult(**result) for result in progress.history]
        points = [EvaluationPoint(**point) for point in progress.points]
        if self._checkpoints is not None:
            self._checkpoints.begin()
        if history:
            self._observer.goes_on(history)
        self._reported.keep(history)
        is_at_end = progress.is_trained and progress.epoch == train.epochs
        if is_at_end and train.epochs in self._reported and self._group.rank == 0:
            leased_epochs.show_all_done(train.epochs)
        elastic = train.elastic
        if elastic is not None and elastic.url is not None and session is not None:
            session.keep_rows(elastic.url, every_sec=elastic.save_every, config=self._run_config)
        stop, best = EarlyStop(self._job.metrics.stop), self._best_model()
        for result in in_order(history, points):
            stop.add(result)
        if best is not None:
            best.begin(progress, in_order(history, points))

        def ends_at(point: EvaluationPoint) -> bool:
            points.append(point)
            del points[:-MOST_POINTS]
            stop.add(point)
            if best is not None:
                best.add(point, progress)
            return stop.is_over

        for epoch in range(progress.epoch, train.epochs + 1):
            is_cut = stop.is_over and progress.is_tested
            if stop.is_over and not is_cut:
                if self._checkpoints is not None:
                    self._checkpoints.at_end(progress)
                break
            self._step.rates.begin_epoch(epoch)
            if not progress.is_trained and not is_cut:
                self._train(epoch, ends_at)
                is_cut = stop.is_over
                progress.is_trained = not is_cut  # a run that goes on without metrics.stop trains on the rest
                if (is_cut or epoch == train.epochs) and self._checkpoints is not None:
                    self._checkpoints.at_end(progress)
            if self._reported.is_past(epoch, rows_are_its=is_at_end):
                history += self._reported.before(epoch)
            else:
                history += self._reported.report(self._end_epoch(epoch))
            if is_cut:
                break
            is_judged = progress.is_tested and self._group.meets  # by the test after the last step
            if history and not is_judged:
                stop.add(history[-1])
            progress.history = [asdict(result) for result in history]
            progress.begin_epoch(epoch + 1)
            if best is not None and not is_judged:
                best.add(history[-1], progress)
        evaluations = in_order(history, points)
        if best is not None:
            best.bring_back(evaluations)
        kept = None if best is None else best.kept
        last: Evaluated | None = history[-1] if history else None
        if kept is not None:
            place = kept.epoch, kept.step
            last = next((each for each in evaluations if (each.epoch, each.step) == place), None)
        seconds = sum(result.samples / result.samples_per_sec for result in history if result.samples_per_sec)
        bad = self._group.total(self._train_reader.bad_lines + self._test_reader.bad_lines)
        mine = self._train_reader.first_bad_line or self._test_reader.first_bad_line
        restores, lost = self._backend.shard_losses()
        self._warn_of_untrained()
        firsts = self._group.collect(None if mine is None else str(mine))
        return TrainResult(
            test_auc=math.nan if last is None else last.test_auc,
            test_log_loss=math.nan if last is None else last.test_log_loss,
            samples_per_sec=sum(result.samples for result in history) / seconds if seconds else 0.0,
            epochs=history[-1].epoch if stop.is_over else train.epochs,
            rows=self._backend.rows(),
            shards=self._backend.shards,
            workers=self._group.world,
            seed=train.seed,
            bad_lines=bad,
            first_bad_line=next((first for first in firsts if first is not None), None),
            backend=self._job.model.backend,
            refused_steps=self._step.refused,
            spikes=self._pauses.spikes.found,
            staleness=self._backend.staleness(),
            tiers=self._backend.tiers(),
            cache={name: self._group.total(count) for name, count in self._backend.cache().items()},
            quorum=self._backend.quorum(),
            stream=self._leased.outcome() if isinstance(self._leased, StreamReader) else {},
            history=tuple(history),
            shard_restores=restores,
            commits_lost=lost,
            best_epoch=None if kept is None else kept.epoch,
            best_step=None if kept is None else kept.step,
            best_checkpoint=None if kept is None else kept.name,
            device=str(self._group.device),
            points=tuple(points),
        )

    def _warn_of_untrained(self) -> None:
        """Warns of tables that have no row at the end, as of a model that forgets them."""
        names = self._backend.untrained() if self._group.rank == 0 else []
        if names:
            _log.warning(
                "no row of %s was trained: the forward did not read it, its gradient was cut off, or its policy "
                "admitted no key",
                " or ".join(f"table {name}" for name in names),
            )

    def _warn_of_empty(self) -> None:
        """Warns of frozen tables that have no row, which nothing of this run will give them."""
        for name in self._backend.empty_frozen() if self._group.rank == 0 else ():
            _log.warning(
                "table %s is frozen, and the namespace has no rows of it: every key reads its initial row; give "
                "tables.%s.weights, or train it first",
                name,
                name,
            )

    def _best_model(self) -> BestModel | None:
        metric = self._job.metrics.best
        return (
            None if metric is None or self._checkpoints is None else BestModel(metric, self._checkpoints, self._group)
        )

    def model_on_host(self, *, is_over: bool = True) -> nn.Module:
        """Returns the model on the host, for what is kept of it.

        Where ranks have it in parts, or rows of tables on their devices, every process calls it, and the first one gets
        a copy with the parts of all.

        Args:
            is_over: whether training is over, so that the model itself may move.
        """
        session = self._backend.session
        if session is not None and session.core.has_device_tables:
            whole = session.gather_tables(self._bare)
            return self._bare if whole is None else whole
        if self._whole is not None:
            return self._whole.gathered(self._bare)
        if is_over or self._group.device.type == "cpu":
            return self._bare.to("cpu")
        return copy_sharing_rows(self._bare).to("cpu")

    @property
    def progress(self) -> Progress:
        """The position of the run."""
        return self._progress

    @property
    def watermark(self) -> int | None:
        """The time up to which all workers have read a stream, microseconds since 1970 in UTC; None: not known."""
        return self._leased.watermark if isinstance(self._leased, StreamReader) else None

    @property
    def model(self) -> nn.Module:
        """The model itself, without DDP, on the device of this worker."""
        return self._bare

    def exported(self, model: nn.Module) -> ProgramSource:
        """Returns the model to export for serving, with an example of its arguments from the first test samples.

        Args:
            model: the model on the host.

        Raises:
            InvalidArgument: the test files have too few good samples.
        """
        return exported(model, self._test_reader, negatives_keep=self._job.data.negatives_keep)

    def feature_files(self) -> dict[str, bytes]:
        """Returns the files of the job's features by name, by which serving makes the model's arguments of columns."""
        return published_features(self._job, self._train_reader.features, self._bare)

    def _train(self, epoch: int, ends_at: Callable[[EvaluationPoint], bool]) -> None:
        """Trains on the batches of an epoch that are left.

        Args:
            epoch: the number of the epoch.
            ends_at: takes the result of each test within it, and returns whether training ends there.
        """
        self._model.train()
        self._pauses.restart()
        if self._leased is not None:
            self._leased.begin_at(epoch, lambda: leased_epochs.trained(self._progress))
        recent, progress = RecentSamples(), self._progress
        began = observed = time.perf_counter()
        seconds_before = progress.seconds
        batches = loaded(self._batches, self._backend.trace, lambda: self._step.number)
        for given in batches:
            if self._step.passes_over():
                if self._checkpoints is not None:
                    self._checkpoints.after_step(self._step.number, progress)  # with the workers that made the step
                continue
            batch = self._placement.placed(given, train=True)
            result = self._run_step(batch)
            progress.is_tested = False
            if not result.is_taken and self._leased is not None and self._backend.session is not None:
                if isinstance(self._leased, StreamReader):
                    self._leased.note_refused()
                self._backend.session.core.end_empty_step()  # commits count the batches of a lease that are done
            if result.is_taken:
                progress.samples += len(batch)
                progress.loss_sum += result.loss * len(batch)
                recent.add(result, len(batch))
                if len(batch):
                    self._pauses.spikes.add(result.loss)
                    if self._backend.session is not None:
                        self._backend.session.core.notes.note_trained(len(batch), result.loss * len(batch))
            if self._progressive is not None:
                self._progressive.add(epoch, result, batch.time_range)
            now = time.perf_counter()
            progress.seconds = seconds_before + now - began
            if self._pauses.is_test_due(self._step.number, result.due):
                # Before a checkpoint of the step, because a run that goes on from there has its result.
                if ends_at(self._pauses.test(epoch, self._step.number, progress)):
                    break
                began += time.perf_counter() - now
            if result.due.return_:
                self._go_back()
                continue
            if result.due.publication:
                now = time.perf_counter()
                self._pauses.publish()
                began += time.perf_counter() - now
            if self._checkpoints is not None:
                self._checkpoints.after_step(self._step.number, progress)
            if now - observed >= _OBSERVE_EVERY_SEC:
                observed = now
                late_loss, late_auc = recent.figures()
                if self._backend.session is not None:
                    self._backend.session.core.notes.note_auc(late_auc)
                reader = self._leased or self._train_reader
                done, all_samples = reader.done, progress.samples_of_all(self._group.world)
                self._observer.batch(epoch=epoch, done=done, samples=all_samples, loss=late_loss, auc=late_auc)
        if self._progressive is not None:
            self._progressive.end_epoch(epoch)
        self._group.wait("last steps of all workers")  # until the last step of every rank is applied
        progress.seconds = seconds_before + time.perf_counter() - began

    def _go_back(self) -> None:
        """Sets the run back to a checkpoint before its loss jumped, on all ranks; the data since is passed over."""
        config, spikes = self._job.train.spike, self._pauses.spikes
        assert self._checkpoints is not None
        assert config is not None
        spikes.note()
        self._group.wait("last steps of all workers")
        name = self._checkpoints.go_back(spikes.recent)
        words = "there is no checkpoint before it to go back to" if name is None else f"it goes back to {name}"
        if self._group.is_first:
            _log.warning("train.spike: the loss has jumped after step %d; %s", self._step.number, words)
        if name is not None:
            self._step.pass_over(config.skip)
        self._model.train()

    def _run_step(self, batch: NamedBatch) -> StepResult:
        try:
            return self._step.run(batch, due=self._pauses.due)
        except torch.OutOfMemoryError as error:
            if self._backend.session is not None:
                self._backend.session.discard()
            cache = self._job.train.cache
            raise out_of_memory(error, None if cache is None else cache.bytes) from error

    def _end_epoch(self, epoch: int) -> EpochResult:
        """Evaluates the model after an epoch and returns the epoch's result."""
        self._backend.settle(is_end=epoch == self._job.train.epochs)
        progress = self._progress
        samples, loss_sum, seconds = progress.samples, progress.loss_sum, progress.seconds
        total = self._group.total(samples)
        if (
            total == 0 and self._leased is None and not self._step.outside
        ):  # with leases, other workers may have had all of the data
            if self._step.refused:
                raise InvalidArgument(f"train: all {self._step.refused} steps were refused for NaN or Inf")
            raise InvalidArgument("data.train: no good line was read, so there is nothing to train on")
        rate, loss = total / seconds if seconds else 0.0, loss_sum / samples if samples else math.nan
        if self._of_all is not None:
            known = leased_epochs.known_result(self._of_all, epoch, self._group.world, self._shown_task)
            if known is not None:
                total, rate, loss = known.samples, known.samples_per_sec, known.train_loss
        step = 0 if self._of_all is not None else self._step.number
        if not self._group.meets and self._group.rank != 0:
            return EpochResult(epoch, loss, total, rate, math.nan, math.nan, step=step)
        if progress.is_tested and self._group.meets:
            point = EvaluationPoint(**progress.points[-1])  # of the same model
            auc, log_loss, metrics = point.test_auc, point.test_log_loss, point.metrics
        else:
            tested = self._pauses.tested(epoch)
            auc, log_loss, metrics = tested.auc, tested.log_loss, dict(tested.metrics)
        return EpochResult(epoch, loss, total, rate, auc, log_loss, metrics, step)
