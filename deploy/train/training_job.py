"""A whole job from one command: its cluster, its workers, their end."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...proto.checkpoint.manifest import number_of
from ...proto.checkpoint.urls import absolute
from ...proto.config.config import ClusterConfig, LogConfig
from ...proto.config.job import JobConfig
from ...proto.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Fenced,
    Internal,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from ...worker.training.run_identity import RunIdentity
from ...worker.training.training_report import TrainResult

if TYPE_CHECKING:
    from ...worker.training.process_group import WorkerGroup

_CLUSTER_DEADLINE_SEC = 60.0
_RESTART_PAUSE_SEC = 0.5


@dataclass(frozen=True)
class TorchrunPlace:
    """This process among those that torchrun started."""

    rank: int
    world: int
    local_world: int
    run: str = ""


def torchrun_place() -> TorchrunPlace | None:
    """From the environment that torchrun sets; None when this process was started otherwise."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return TorchrunPlace(rank, world, local, os.environ["TORCHELASTIC_RUN_ID"])


def checked_resume(job: JobConfig, resume: str) -> str:
    """The value of ``--resume``.

    Raises:
        InvalidArgument: it is no such value.
        FailedPrecondition: the job has no checkpoints.
    """
    if resume not in ("auto", "never") and number_of(resume) is None:
        raise InvalidArgument(
            f"--resume {resume!r} is not allowed; allowed: auto, never, or a name such as save-000003"
        )
    elastic = job.train.elastic
    if resume != "never" and job.train.checkpoint is None and (elastic is None or elastic.url is None):
        raise FailedPrecondition(f"--resume {resume}: the job has no section train.checkpoint")
    return resume


def check_overwrites(job: JobConfig, resume: str, *, overwrites: bool) -> None:
    """Raises InvalidArgument where ``--overwrite-checkpoints`` would remove nothing."""
    elastic = job.train.elastic
    if overwrites and resume != "never":
        raise InvalidArgument(f"--overwrite-checkpoints: has no effect with --resume {resume}, which goes on from them")
    if overwrites and job.train.checkpoint is None and (elastic is None or elastic.url is None):
        raise InvalidArgument(
            "--overwrite-checkpoints: has no effect, as the job has neither train.checkpoint nor train.elastic.url"
        )


def allowed_restarts(job: JobConfig, resume: str) -> int:
    """How often a run that fails may begin again from its last checkpoint: 0 unless it resumes by itself."""
    saved = job.train.checkpoint or job.train.elastic
    return saved.max_restarts if resume == "auto" and saved is not None else 0


def run_job(
    job: JobConfig,
    place: TorchrunPlace | None = None,
    trace_file: Path | None = None,
    *,
    resume: str = "never",
    overwrites: bool = False,
) -> TrainResult:
    """Trains ``job``; everything that was started is stopped when this returns or raises.

    With ``resume`` auto a run in which a process ends, or cannot be reached, begins again from the last checkpoint.

    Args:
        job: what to train.
        place: under torchrun, this process's; None starts ``job.train.workers`` workers here.
        trace_file: where worker 0 writes what ran when (Trace Event Format); None: nothing is recorded.
        resume: of :func:`checked_resume`.
        overwrites: removes checkpoints of other runs from the job's folders.

    Raises:
        SparserowError: a file, a setting, a server or a worker is at fault.
    """
    if place is not None:  # torchrun starts workers again by itself
        from torch.distributed.elastic.multiprocessing.errors import record  # slow to import

        # Each agent of torchrun shows the first error of its host; the coordinator has those of all hosts.
        identity = RunIdentity.of_torchrun(place.run, resume=resume, overwrites=overwrites)
        result = record(_run_under_torchrun)(job, place, trace_file, resume, identity)
        assert result is not None
        return result
    identity = RunIdentity.new(resume=resume, overwrites=overwrites)
    for left in range(allowed_restarts(job, resume), -1, -1):
        try:
            return _run_once(job, trace_file, resume, identity)
        except (Unavailable, Fenced, DeadlineExceeded, NotFound, Internal) as error:
            if not left:
                raise
            print(f"sparserow: {error}; all go back to the last checkpoint ({left} restarts left)", file=sys.stderr)
            time.sleep(_RESTART_PAUSE_SEC)
    raise AssertionError("unreachable")


def _run_once(job: JobConfig, trace_file: Path | None, resume: str, identity: RunIdentity) -> TrainResult:
    # Workers of their own, so that the end of one is not this process's.
    is_apart = job.train.workers > 1 or resume == "auto" or job.train.elastic is not None
    if not is_apart:
        from ...worker.training.build_model import check_data  # imports torch, as this process will anyway

        check_data(job.data, job.model)
    with _cluster(job) as (coordinator, check):
        if is_apart:
            from .job_workers import run_job_workers

            return run_job_workers(
                job,
                workers=job.train.workers,
                coordinator=coordinator,
                trace_file=trace_file,
                resume=resume,
                identity=identity,
                check=check,
            )
        from ...worker.training.process_group import WorkerGroup

        return _run_here(
            job,
            WorkerGroup(),
            local_world=1,
            coordinator=coordinator,
            trace_file=trace_file,
            resume=resume,
            identity=identity,
        )


def _run_here(
    job: JobConfig,
    group: WorkerGroup,
    *,
    local_world: int,
    coordinator: str | None,
    trace_file: Path | None,
    resume: str,
    identity: RunIdentity,
    run: str = "",
) -> TrainResult:
    from .training_display import TrainingDisplay
    from .training_run import run_worker

    of_worker = None if group.meets or group.world == 1 else group.rank
    with TrainingDisplay(job.train.epochs, silent=group.rank != 0, of_worker=of_worker) as display:
        return run_worker(
            job,
            group,
            local_world=local_world,
            coordinator=coordinator,
            observer=display,
            trace_file=trace_file,
            resume=resume,
            run=run,
            identity=identity,
        )


def _run_under_torchrun(
    job: JobConfig, place: TorchrunPlace, trace_file: Path | None, resume: str, identity: RunIdentity
) -> TrainResult:
    """Worker 0 starts the cluster where none is named, and tells the others its address."""
    from ...worker.training.process_group import joined_group

    if _starts_cluster(job) and place.local_world != place.world:
        raise FailedPrecondition(
            "cluster.address: is missing; a job on several machines needs a running cluster that all of them reach"
        )
    if job.train.dense == "ps":
        return _run_apart(job, place, trace_file, resume, identity)
    with joined_group(place.rank, place.world, "env://") as group, contextlib.ExitStack() as stack:
        address = stack.enter_context(_cluster(job))[0] if group.rank == 0 else None
        address = group.share(address)
        result = _run_here(
            job,
            group,
            local_world=place.local_world,
            coordinator=address,
            trace_file=trace_file,
            resume=resume,
            identity=identity,
        )
        group.wait()  # worker 0 stops the cluster when all have left it
        return result


def _run_apart(
    job: JobConfig, place: TorchrunPlace, trace_file: Path | None, resume: str, identity: RunIdentity
) -> TrainResult:
    """Workers that never meet: each returns its own part, and the first the evaluation."""
    from ...worker.training.process_group import WorkerGroup

    if _starts_cluster(job):
        raise FailedPrecondition(
            "cluster.address: is missing; under torchrun, train.dense ps needs a running cluster, as workers never meet"
        )
    group = WorkerGroup(place.rank, place.world, meets=False)
    return _run_here(
        job,
        group,
        local_world=place.local_world,
        coordinator=job.cluster.address,
        trace_file=trace_file,
        resume=resume,
        run=place.run,
        identity=identity,
    )


def _starts_cluster(job: JobConfig) -> bool:
    return job.model.backend == "ps" and job.cluster.address is None


def _with_root(job: JobConfig) -> ClusterConfig:
    """The job's own cluster, which saves below the folder of the job's checkpoints."""
    if job.train.checkpoint is None:
        return job.cluster
    roots = (*job.cluster.checkpoint_roots, absolute(job.train.checkpoint.url))
    return job.cluster.model_copy(update={"checkpoint_roots": roots})


@contextlib.contextmanager
def _cluster(job: JobConfig) -> Iterator[tuple[str | None, Callable[[], None]]]:
    """The coordinator's address (of the running cluster, or of one for the duration of the block; None for none), and
    what raises when a cluster of the block's own has ended.
    """
    if not _starts_cluster(job):
        yield (job.cluster.address if job.model.backend == "ps" else None), lambda: None
        return
    from ..launch.local_cluster import start_local

    cluster = start_local(_with_root(job), LogConfig(level="warning"), deadline_sec=_CLUSTER_DEADLINE_SEC)
    try:
        yield cluster.address, cluster.check
        cluster.check()
    finally:
        cluster.stop()
