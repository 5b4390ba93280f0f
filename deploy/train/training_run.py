"""Puts together and runs one worker of a job: session, backend, trainer. It is the composition root of training."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...proto.config.job import JobConfig
from ...proto.errors import FailedPrecondition, SparserowError
from ...proto.process.cores import available_cores
from ...proto.process.lone_work import lone_work
from ...worker.training.training_report import Observer, Silence, TrainResult

if TYPE_CHECKING:
    from torch import nn

    from ...worker.api.session import Session
    from ...worker.training.process_group import WorkerGroup
    from ...worker.training.run_identity import RunIdentity
    from ...worker.training.trainer import Trainer
    from ...worker.training.training_backend import TrainingBackend

_DEADLINE_SEC = 30.0
# A pull of a worker may wait while worker 0 evaluates, because there is no collective in which it could wait.
_APART_DEADLINE_SEC = 600.0
_GATHER_SEC = 600.0  # workers that a scheduler places may start minutes apart


def run_worker(
    job: JobConfig,
    group: WorkerGroup,
    *,
    local_world: int,
    coordinator: str | None,
    observer: Observer,
    trace_file: Path | None = None,
    resume: str = "never",
    run: str = "",
    identity: RunIdentity | None = None,
) -> TrainResult:
    """Trains ``job`` as one worker of ``group``; all ranks return the same metrics.

    Args:
        job: the job to train.
        group: this worker and its peers.
        local_world: the number of workers that share this machine's cores.
        coordinator: ``HOST:PORT`` of the coordinator; None with backend local.
        observer: receives the progress on rank 0.
        trace_file: the file to which rank 0 writes a trace of all workers. Where workers do not wait for each other,
            every other rank writes a file of its own, with ``.RANK`` behind the name. None records none.
        resume: "never"; "auto", to begin at the newest checkpoint if there is one; or the name of a checkpoint.
        run: the id of the run, for ``train.elastic``.
        identity: the identity of the run, for its checkpoints; None makes a new one.

    Returns:
        The result of the job.

    Raises:
        FailedPrecondition: the job's folders have checkpoints of another run.
        SparserowError: a file, a setting, a server or a peer is at fault.
    """
    import pyarrow as pa
    import torch

    from ...proto.process.metrics import serve_metrics
    from ...proto.process.startup import end_start
    from ...worker.session.tracing import NoTrace, RecordedTrace, write_trace
    from ...worker.training.parallel_group import ParallelGroup, in_groups
    from ...worker.training.run_identity import RunIdentity
    from ...worker.training.trainer import Trainer
    from ...worker.training.user_errors import named_as_theirs
    from .run_log import RunLog
    from .training_metrics import TrainingMetrics

    identity = identity or RunIdentity.new(resume=resume)
    process, group = group.rank, in_groups(job.train.parts, group)
    _check_folders(job, group, identity)
    threads = max(1, available_cores() // local_world)
    torch.set_num_threads(job.train.threads or threads)
    pa.set_cpu_count(threads)  # of Arrow, which decodes the columns of files
    watched = contextlib.ExitStack()
    watcher: Observer = Silence()
    if group.is_first:
        watcher = watched.enter_context(RunLog(job, observer)) if _is_written(job) else observer
    metrics = TrainingMetrics(group.rank, watcher)
    trace = NoTrace() if trace_file is None else RecordedTrace(group.rank)

    def train_with(backend: TrainingBackend, end: Callable[[], None] = lambda: None) -> TrainResult:
        end_start()
        session = backend.session
        publish = None if session is None or job.publish.every is None else partial(_publish_now, job, session, group)
        trainer = Trainer(
            job,
            group=group,
            backend=backend,
            observer=metrics,
            run=run,
            identity=identity,
            resume=resume,
            publish=publish,
        )
        with named_as_theirs(job.model.class_):
            result = trainer.run()
        end()
        is_kept = backend.session is not None and job.publish.folder is not None
        model = trainer.model_on_host() if is_kept else None
        if group.is_first:
            with lone_work.doing("publication of the model"):
                result = _with_places(job, trainer, model, backend, result)
        if trace_file is not None and isinstance(trace, RecordedTrace):
            events = [
                event for part in group.collect(trace.events(), what="publication of the model") for event in part
            ]
            if group.is_first:
                write_trace(trace_file, events)
            elif not group.meets:
                write_trace(trace_file.with_name(f"{trace_file.name}.{group.rank}"), events)
        return result

    first_port, host = job.train.metrics_port, job.train.metrics_host
    port = None if first_port is None else first_port + process
    if job.model.backend == "local":
        from ...worker.training.local_backend import LocalBackend

        with watched, serve_metrics(metrics, host=host, port=port):
            return train_with(LocalBackend(job.train, job.model.min_rows, trace))
    if coordinator is None:
        raise FailedPrecondition("train: model.backend ps needs a cluster; no coordinator was given")
    from ...proto.process.telemetry import telemetry_from_environment
    from ...worker.api.connect import connect
    from ...worker.session.row_cache import RowCache, check_cache
    from ...worker.session.session_metrics import SessionMetrics
    from ...worker.training.ps_backend import PsBackend
    from .placements import placements_of

    train = job.train
    cache = None if train.cache is None else RowCache(**train.cache.model_dump())
    check_cache(cache, train.staleness, "train.cache")
    place: dict[str, Any] = {"rank": group.rank, "world_size": group.world}
    if isinstance(group, ParallelGroup):
        place = {"mesh": group.mesh}
    with (
        watched,
        serve_metrics(metrics, host=host, port=port),
        telemetry_from_environment("trainer") or contextlib.nullcontext() as telemetry,
        connect(
            coordinator,
            namespace=job.name,
            staleness=train.staleness,
            quorum=train.quorum,
            on_nonfinite=train.on_nonfinite,
            wire_dtype=train.wire_dtype,
            transport=train.transport,
            grad_scale=train.grad_scale,
            namespace_policy=train.namespace_policy,
            **place,
            deadline_sec=_DEADLINE_SEC if group.meets else _APART_DEADLINE_SEC,
            gather_sec=_GATHER_SEC,
            cache=cache,
        ) as session,
    ):
        metrics.session = SessionMetrics(session)
        backend = PsBackend(
            job, session, coordinator, device=group.device, choose=placements_of(job, group, local_world)
        )
        if isinstance(trace, RecordedTrace):
            session.core.record(trace)
            return train_with(backend, session.core.end_record)
        if telemetry is not None:
            session.record_otel(telemetry.tracer)
        return train_with(backend)


def _is_written(job: JobConfig) -> bool:
    return job.metrics.file is not None or job.metrics.tensorboard is not None


def _with_places(
    job: JobConfig, trainer: Trainer, model: nn.Module | None, backend: TrainingBackend, result: TrainResult
) -> TrainResult:
    """Keeps or publishes the model as the job says; returns the result with the places that have the model.

    The model is None when the job keeps none.
    """
    if backend.session is None:
        return result
    from .kept_model import KeptModel, TrainedModel, keep_model

    kept = KeptModel()
    if model is not None:
        source, features = trainer.exported(model), trainer.feature_files()
        kept = keep_model(job, TrainedModel(backend.session, source, _card_of(job, result), features))
    places = [*kept.places]
    if job.train.checkpoint is not None:
        places.append(f"checkpoints in {job.train.checkpoint.url}")
    if job.cluster.address is not None:
        places.append(f"rows in namespace {job.name} of {job.cluster.address}")
    return replace(result, kept=tuple(places), commands=kept.commands, problem=kept.problem)


def _publish_now(job: JobConfig, session: Session, group: WorkerGroup, trainer: Trainer, model: nn.Module) -> None:
    """Publishes the model of a run that goes on."""
    from .kept_model import TrainedModel, publish_running
    from .version_start import CHECKPOINT, newest_checkpoint

    progress, card = trainer.progress, dict[str, Any]()
    card["samples"] = progress.samples_of_all(group.world)
    if progress.is_tested:
        tested = progress.points[-1]
        found = {"auc": tested["test_auc"], "log_loss": tested["test_log_loss"]}
        card |= {name: value for name, value in found.items() if math.isfinite(value)}
    if (newest := newest_checkpoint(job)) is not None:
        card[CHECKPOINT] = newest
    if trainer.watermark is not None:
        card["watermark"] = datetime.fromtimestamp(trainer.watermark / 1e6, UTC).isoformat(timespec="seconds")

    def at_work(_: int) -> None:
        session.core.notes.note_work(True)

    def trained() -> TrainedModel:
        return TrainedModel(session, trainer.exported(model), card, trainer.feature_files())

    publish_running(job, trained, None if group.meets else at_work)


def _card_of(job: JobConfig, result: TrainResult) -> dict[str, Any]:
    """Returns the card of a version: the AUC and log loss, or the metrics of all tasks where no task has these.

    It names the checkpoint with what the version has learnt, if there is one. Where the model is that of the best test,
    the card has the epoch, the steps and the checkpoint of that one.
    """
    from ...proto.checkpoint.folder import Folder
    from ...proto.checkpoint.manifest import read_manifest
    from ...proto.checkpoint.urls import absolute
    from .version_start import CHECKPOINT, newest_checkpoint

    found = {"auc": result.test_auc, "log_loss": result.test_log_loss}
    if not math.isfinite(result.test_auc):
        found |= {name: value for name, value in result.metrics.items() if "[" not in name}
    card: dict[str, Any] = {"epochs": result.epochs}
    card |= {name: value for name, value in found.items() if math.isfinite(value)}
    if result.best_epoch is not None and job.train.checkpoint is not None:
        url = absolute(job.train.checkpoint.url)
        saved = read_manifest(Folder(url), result.best_checkpoint)
        card |= {"epochs": result.best_epoch, "step": saved.step + 1, CHECKPOINT: f"{url}/{saved.name}"}
    elif (newest := newest_checkpoint(job)) is not None:
        card[CHECKPOINT] = newest
    return card


def _check_folders(job: JobConfig, group: WorkerGroup, identity: RunIdentity) -> None:
    """Checks the job's folders on rank 0 before any worker joins the job, and refuses the job on all ranks.

    No other rank can pass the gathering of the job without rank 0.
    """
    refusal = None
    if group.is_first:
        try:
            identity.check_folders(job)
            _make_folder_of_models(job)
        except SparserowError as error:
            refusal = error
    if group.meets:
        refusal = group.share(refusal, what="look into the folders of the job")
    if refusal is not None:
        raise refusal


def _make_folder_of_models(job: JobConfig) -> None:
    """Creates the folder of models that the job names, and writes and removes a file there, before anything trains.

    Raises:
        FailedPrecondition, ResourceExhausted: the folder cannot be written; the text names the setting.
        InvalidArgument: ``publish.sign`` is given without a signing key.
    """
    from ...proto.checkpoint.folder import Folder
    from ...proto.security.security import process_security
    from ...worker.publish.asked_version import checked_sign

    checked_sign(job.publish.sign, process_security())
    if job.publish.is_asked and job.model.backend == "ps":
        try:
            folder = Folder(str(job.publish.folder))
            folder.make()
            folder.probe()
        except SparserowError as error:
            setting = "local" if job.publish.root is None else "root"
            raise type(error)(f"publish.{setting}: models cannot be written there: {error}") from error
