"""One worker's run of a job, put together: session, backend, trainer. The composition root of training."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...proto.config.job import JobConfig
from ...proto.errors import FailedPrecondition
from ...worker.training.training_report import Observer, Silence, TrainResult

if TYPE_CHECKING:
    from ...worker.training.process_group import WorkerGroup
    from ...worker.training.run_identity import RunIdentity
    from ...worker.training.trainer import Trainer
    from ...worker.training.training_backend import TrainingBackend

_DEADLINE_SEC = 30.0
# A worker's pull may wait while worker 0 evaluates: there is no collective in which it could wait instead.
_APART_DEADLINE_SEC = 600.0
_GATHER_SEC = 600.0  # workers that a scheduler places may come minutes apart


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
        job: what to train.
        group: this worker and its peers.
        local_world: workers that share this machine's cores.
        coordinator: ``HOST:PORT``; None with backend local.
        observer: told of progress on rank 0.
        trace_file: where rank 0 writes what ran when, of all workers; where workers never meet,
            another writes a file of its own, ``.RANK`` behind the name. None: nothing is recorded.
        resume: never; auto: from the newest checkpoint, where there is one; or the name of a checkpoint.
        run: names the run, for ``train.elastic``.
        identity: of the run, for its checkpoints; None: a run of its own.

    Raises:
        FailedPrecondition: the job's folders have checkpoints of another run.
        SparserowError: a file, a setting, a server or a peer is at fault.
    """
    import torch

    from ...ps_server.process.metrics import serve_metrics
    from ...worker.session.tracing import NoTrace, RecordedTrace, write_trace
    from ...worker.training.run_identity import RunIdentity
    from ...worker.training.trainer import Trainer
    from .training_metrics import TrainingMetrics

    identity = identity or RunIdentity.new(resume=resume)
    _check_folders(job, group, identity)
    torch.set_num_threads(job.train.threads or max(1, (os.cpu_count() or 1) // local_world))
    watcher: Observer = observer if group.rank == 0 else Silence()
    metrics = TrainingMetrics(group.rank, watcher)
    trace = NoTrace() if trace_file is None else RecordedTrace(group.rank)

    def train_with(backend: TrainingBackend, end: Callable[[], None] = lambda: None) -> TrainResult:
        trainer = Trainer(job, group=group, backend=backend, observer=metrics, run=run, identity=identity)
        if resume != "never":
            trainer.resume(None if resume == "auto" else resume)
        result = trainer.run()
        end()
        result = _with_places(job, trainer, backend, result) if group.rank == 0 else result
        if trace_file is not None and isinstance(trace, RecordedTrace):
            events = [event for part in group.collect(trace.events()) for event in part]
            if group.rank == 0:
                write_trace(trace_file, events)
            elif not group.meets:
                write_trace(trace_file.with_name(f"{trace_file.name}.{group.rank}"), events)
        return result

    first_port, host = job.train.metrics_port, job.train.metrics_host
    port = None if first_port is None else first_port + group.rank
    if job.model.backend == "local":
        from ...worker.training.local_backend import LocalBackend

        with serve_metrics(metrics, host=host, port=port):
            return train_with(LocalBackend(job.train, trace))
    if coordinator is None:
        raise FailedPrecondition("train: model.backend ps needs a cluster")
    from ...proto.telemetry import telemetry_from_environment
    from ...worker.session.connect import connect
    from ...worker.session.row_cache import RowCache, check_cache
    from ...worker.session.session_metrics import SessionMetrics
    from ...worker.training.ps_backend import PsBackend

    train = job.train
    cache = None if train.cache is None else RowCache(**train.cache.model_dump())
    check_cache(cache, train.staleness, "train.cache")
    with (
        serve_metrics(metrics, host=host, port=port),
        telemetry_from_environment("trainer") or contextlib.nullcontext() as telemetry,
        connect(
            coordinator,
            namespace=job.name,
            staleness=train.staleness,
            on_nonfinite=train.on_nonfinite,
            rank=group.rank,
            world_size=group.world,
            deadline_sec=_DEADLINE_SEC if group.meets else _APART_DEADLINE_SEC,
            gather_sec=_GATHER_SEC,
            cache=cache,
        ) as session,
    ):
        metrics.session = SessionMetrics(session)
        if isinstance(trace, RecordedTrace):
            session.core.record(trace)
            return train_with(PsBackend(job, session, coordinator), session.core.end_record)
        if telemetry is not None:
            from ...worker.session.otel_trace import record_otel

            record_otel(session, telemetry.tracer)
        return train_with(PsBackend(job, session, coordinator))


def _with_places(job: JobConfig, trainer: Trainer, backend: TrainingBackend, result: TrainResult) -> TrainResult:
    """Keeps or publishes the model as the job says; the result, with what has the model when the run is over."""
    if backend.session is None:
        return result
    from .kept_model import KeptModel, TrainedModel, keep_model

    kept = KeptModel()
    if job.publish is not None or job.keep is not None:
        card = {"auc": result.test_auc, "log_loss": result.test_log_loss, "epochs": result.epochs}
        kept = keep_model(job, TrainedModel(backend.session, trainer.model, trainer.example(), card))
    places = [*kept.places]
    if job.train.checkpoint is not None:
        places.append(f"checkpoints in {job.train.checkpoint.url}")
    if job.cluster.address is not None:
        places.append(f"rows in namespace {job.name} of {job.cluster.address}")
    return replace(result, kept=tuple(places), commands=kept.commands)


def _check_folders(job: JobConfig, group: WorkerGroup, identity: RunIdentity) -> None:
    """Before any worker joins the job: rank 0 looks, and no other one passes its gathering without it."""
    refusal = None
    if group.rank == 0:
        try:
            identity.check_folders(job)
            _make_folder_of_models(job)
        except FailedPrecondition as error:
            refusal = error
    if group.meets:
        refusal = group.share(refusal)
    if refusal is not None:
        raise refusal


def _make_folder_of_models(job: JobConfig) -> None:
    """Raises FailedPrecondition where the job names one that cannot be made."""
    from ...proto.checkpoint.folder import Folder

    root = job.keep if job.publish is None else job.publish.root
    if root is not None and {"publish", "keep"} & job.model_fields_set and job.model.backend == "ps":
        Folder(root).make()
