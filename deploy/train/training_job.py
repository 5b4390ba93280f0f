"""Runs a whole job from one command: starts its cluster and its workers, and stops them."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ...proto.checkpoint.manifest import number_of
from ...proto.checkpoint.urls import absolute, folder_and_name
from ...proto.config.cluster_config import ClusterConfig
from ...proto.config.job import JobConfig
from ...proto.config.log_config import LogConfig
from ...proto.config.parallel_config import check_ranks
from ...proto.config.quorum_rules import check_members
from ...proto.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Fenced,
    Internal,
    InvalidArgument,
    NotFound,
    Unavailable,
    not_allowed,
)
from ...worker.training.run_identity import RunIdentity
from ...worker.training.training_report import TrainResult

if TYPE_CHECKING:
    from ...worker.training.process_group import WorkerGroup

_CLUSTER_DEADLINE_SEC = 60.0
_RESTART_PAUSE_SEC = 0.5


@dataclass(frozen=True)
class TorchrunPlace:
    """The position of this process among those that torchrun started.

    Attributes:
        rank, world: the rank of this process, and the number of processes on all machines.
        local_world: the number of processes on this machine.
        local_rank: the number of this process among those of its machine, from 0.
        run: the id of torchrun's run.
    """

    rank: int
    world: int
    local_world: int
    run: str = ""
    local_rank: int = 0


def torchrun_place() -> TorchrunPlace | None:
    """Returns the position that torchrun set in the environment; None when torchrun did not start this process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    local_rank = int(os.environ.get("LOCAL_RANK", rank % local))  # launchers that stand in for torchrun may not set it
    return TorchrunPlace(rank, world, local, os.environ["TORCHELASTIC_RUN_ID"], local_rank)


def checked_resume(job: JobConfig, resume: str) -> str:
    """Returns the value of ``--resume``, after checking it.

    Raises:
        InvalidArgument: the value is not allowed.
        FailedPrecondition: the job has no checkpoints.
    """
    if resume not in ("auto", "never") and number_of(resume) is None:
        raise not_allowed("--resume", resume, "auto, never, or a name such as save-000003")
    elastic = job.train.elastic
    if resume != "never" and job.train.checkpoint is None and (elastic is None or elastic.url is None):
        raise FailedPrecondition(f"--resume {resume}: the job has no section train.checkpoint")
    return resume


def check_overwrites(job: JobConfig, resume: str, *, overwrites: bool) -> None:
    """Raises InvalidArgument when ``--overwrite-checkpoints`` would remove nothing."""
    elastic = job.train.elastic
    if overwrites and resume != "never":
        raise InvalidArgument(
            f"--overwrite-checkpoints: has no effect with --resume {resume}, which continues from them"
        )
    if overwrites and job.train.checkpoint is None and (elastic is None or elastic.url is None):
        raise InvalidArgument(
            "--overwrite-checkpoints: has no effect, because the job has neither train.checkpoint nor train.elastic.url"
        )


def allowed_restarts(job: JobConfig, resume: str) -> int:
    """Returns how often a failed run may begin again from its last checkpoint; 0 unless ``resume`` is auto."""
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
    """Trains ``job``; every process that was started has stopped when this returns or raises.

    With ``resume`` auto, a run in which a process ends, or cannot be reached, begins again from the last checkpoint. A
    run that would fail again, as for a file that is not there or a class that raises, ends at once.

    Args:
        job: the job to train.
        place: the position of this process under torchrun; None starts ``job.train.workers`` workers here.
        trace_file: the file to which worker 0 writes a trace (Trace Event Format); None records none.
        resume: the value that :func:`checked_resume` returned.
        overwrites: whether checkpoints of other runs are removed from the job's folders.

    Raises:
        SparserowError: a file, a setting, a server or a worker is at fault.
    """
    if place is not None:  # torchrun restarts workers by itself
        from torch.distributed.elastic.multiprocessing.errors import record  # this import is slow

        # Each agent of torchrun shows the first error of its host; the coordinator has those of all hosts.
        identity = RunIdentity.of_torchrun(place.run, resume=resume, overwrites=overwrites)
        result = record(_run_under_torchrun)(job, place, trace_file, resume, identity)
        assert result is not None
        return result
    identity = RunIdentity.new(resume=resume, overwrites=overwrites)
    _check_before(job)
    for left in range(allowed_restarts(job, resume), -1, -1):
        try:
            return _run_once(job, trace_file, resume, identity)
        except (Unavailable, Fenced, DeadlineExceeded, NotFound, Internal) as error:
            if not left:
                raise
            print(
                f"sparserow: {error}; the run begins again from the last checkpoint ({left} restarts left)",
                file=sys.stderr,
            )
            time.sleep(_RESTART_PAUSE_SEC)
    raise AssertionError("unreachable")


def _runs_apart(job: JobConfig, resume: str) -> bool:
    """Returns whether the workers are separate processes, so that the end of a worker does not end this process."""
    return job.train.workers > 1 or _begins_again(job, resume)


def _begins_again(job: JobConfig, resume: str) -> bool:
    """Returns whether the run, or a worker of it, may begin again after a failure."""
    return resume == "auto" or job.train.elastic is not None


def _check_before(job: JobConfig) -> None:
    """Finds the errors that no new start mends, before a run that may begin again or replace its workers."""
    check_ranks(job.train.parallel, job.train.workers)
    check_members(job.train, job.train.workers)
    from ...worker.training.build_model import check_data  # imports torch
    from .dry_export import check_export

    check_data(job)
    check_export(job)


def _run_once(job: JobConfig, trace_file: Path | None, resume: str, identity: RunIdentity) -> TrainResult:
    is_apart, device = _runs_apart(job, resume), None
    if not is_apart:
        from ...worker.training.training_device import training_device

        device = training_device(job.train, local_rank=0, local_world=1, world=1)
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
        from ...worker.training.process_group import joined_group

        assert device is not None
        with joined_group(0, 1, None, device=device) as group:
            return _run_here(
                job,
                group,
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
    """Runs one worker under torchrun; worker 0 starts the cluster where none is named, and shares its address."""
    from ...worker.training.process_group import joined_group
    from ...worker.training.training_device import training_device

    check_ranks(job.train.parallel, place.world)
    check_members(job.train, place.world)
    if _starts_cluster(job) and place.local_world != place.world:
        raise FailedPrecondition(
            "cluster.address: the address is missing; a job on several machines needs a running cluster that all of "
            "them reach"
        )
    if job.train.dense == "ps":
        return _run_apart(job, place, trace_file, resume, identity)
    device = training_device(
        job.train, local_rank=place.local_rank, local_world=place.local_world, world=place.world
    )  # fmt: skip
    with (
        joined_group(
            place.rank, place.world, "env://", device=device, timeout=timedelta(seconds=job.train.timeout)
        ) as group,
        contextlib.ExitStack() as stack,
    ):
        address = stack.enter_context(_cluster(job))[0] if group.rank == 0 else None
        address = group.share(address, what="start of the cluster")
        result = _run_here(
            job,
            group,
            local_world=place.local_world,
            coordinator=address,
            trace_file=trace_file,
            resume=resume,
            identity=identity,
        )
        group.wait("publication of the model")  # worker 0 stops the cluster when all have left it
        return result


def _run_apart(
    job: JobConfig, place: TorchrunPlace, trace_file: Path | None, resume: str, identity: RunIdentity
) -> TrainResult:
    """Runs this worker of a job whose workers do not wait for each other.

    Each returns the metrics of its own part, and the first also the evaluation.
    """
    from ...worker.training.process_group import WorkerGroup

    if _starts_cluster(job):
        raise FailedPrecondition(
            "cluster.address: the address is missing; under torchrun, train.dense ps needs a running cluster"
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
    """Returns the section of the job's own cluster, which may also save below the folder of the job's checkpoints."""
    saves = job.train.checkpoint or job.train.elastic
    if saves is None:
        return job.cluster
    roots = [*job.cluster.checkpoint_roots, *([] if saves.url is None else [absolute(saves.url)])]
    if saves.start_from is not None:
        roots.append(folder_and_name(saves.start_from)[0])
    return job.cluster.model_copy(update={"checkpoint_roots": tuple(roots)})


@contextlib.contextmanager
def _cluster(job: JobConfig) -> Iterator[tuple[str | None, Callable[[], None]]]:
    """Yields the address of the coordinator, and a check that raises when the job's own cluster has ended.

    The coordinator is that of the running cluster, or of a cluster for the duration of the block. The address is None
    with backend local.
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
