"""Runs the workers of a training job with Ray Train: a TorchTrainer starts them, and restarts all when one fails."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...proto.config.job import JobConfig
from ...proto.config.parallel_config import check_ranks
from ...proto.config.quorum_rules import check_members
from ...proto.errors import FailedPrecondition, InvalidArgument, SparserowError, Unavailable, error_of
from ...proto.extras import install_command
from ...proto.options.document import validate
from ...proto.security.security import process_security, use_security
from ...worker.training.run_identity import RunIdentity
from ..launch.readiness import wait_until_ready
from ..train.training_job import allowed_restarts, checked_resume
from ..train.version_start import with_known_start
from .checked_nodes import nodes_to_avoid

_NODE_ID = "ray.io/node-id"  # a label that Ray gives every node
_READY_SEC = 180.0  # time for a shard whose node is gone to come back on another one


def train_on_ray(
    job: JobConfig,
    coordinator: str,
    *,
    resume: str | None = None,
    overwrites: bool = False,
    cpus_per_worker: float = 1.0,
    storage_path: str | None = None,
) -> dict[str, Any]:
    """Trains ``job`` on a running cluster, with ``train.workers`` workers that Ray Train places and restarts.

    With ``resume`` auto, all workers return to the newest checkpoint when one fails or its node is gone. They do so at
    most ``max_restarts`` times (of ``train.checkpoint`` or ``train.elastic``).

    Args:
        job: the job to train; it must not start a cluster of its own.
        coordinator: ``HOST:PORT`` of the cluster's coordinator.
        resume: the value of ``sparserow train --resume``; None means auto when the job has checkpoints, and never
            otherwise.
        overwrites: whether checkpoints of other runs are removed from the job's folders, with ``resume`` never.
        cpus_per_worker: the CPUs that Ray reserves for each worker.
        storage_path: the folder of Ray Train's own records, which all nodes reach; None is Ray's default.

    Returns:
        The result as ``sparserow train --json`` writes it; with ``train.dense`` ps that of worker 0.

    Raises:
        FailedPrecondition: Ray Train is not installed, the job has no checkpoints to resume from, or
            ``train.node_check`` found a bad node that the job cannot do without.
        InvalidArgument: the job starts a cluster of its own, has backend local, or names a relative path, which is not
            possible because workers run in folders of their own.
        NotFound, InvalidArgument, DataLoss: a node does not have the job's data (the text names it), or the data are
            malformed.
        Unavailable: a worker failed for good; ``sparserow status --faults`` has its traceback.
    """
    try:
        import ray
        import ray.train
        from ray.train.torch import TorchTrainer
    except ImportError:
        raise FailedPrecondition(f"Ray Train is not installed; install it with: {install_command('ray')}") from None
    if job.cluster.model_fields_set - {"address"} or job.model.backend != "ps":
        raise InvalidArgument(
            "cluster: a job on Ray uses neither a cluster of its own nor backend local; remove the section"
        )
    job = with_known_start(job)
    check_ranks(job.train.parallel, job.train.workers)
    check_members(job.train, job.train.workers)
    if job.data.days is not None:
        raise InvalidArgument("data.days: is not possible on Ray; start a run a day, from the day before (start_from)")
    _check_paths(job)
    if "local" not in job.publish.model_fields_set:  # the folder of a worker is removed with the worker
        job = job.model_copy(update={"publish": job.publish.model_copy(update={"local": None})})
    if resume is None:
        resume = (
            "auto" if job.train.checkpoint is not None or (job.train.elastic and job.train.elastic.url) else "never"
        )
    begin = checked_resume(job, resume)
    avoided = [] if job.train.node_check is None else nodes_to_avoid(job, cpus_per_worker)
    security = process_security().path
    order = {
        "job": job.model_dump(mode="json", exclude_unset=True),
        "coordinator": coordinator,
        "resume": begin,
        "run": secrets.token_hex(8),
        "identity": asdict(RunIdentity.new(resume=resume, overwrites=overwrites)),
        "security": None if security is None else str(security.resolve()),
    }
    uses_gpu = job.train.device == "cuda"  # Ray shows a worker without a GPU of its own no device
    trainer = TorchTrainer(
        _work,
        train_loop_config=order,
        torch_config=ray.train.torch.TorchConfig(backend="cpu:gloo,cuda:nccl" if uses_gpu else "gloo"),
        scaling_config=ray.train.ScalingConfig(
            num_workers=job.train.workers,
            use_gpu=uses_gpu,
            resources_per_worker={"CPU": cpus_per_worker, **({"GPU": 1} if uses_gpu else {})},
            label_selector={_NODE_ID: f"!in({','.join(avoided)})"} if avoided else None,
        ),
        run_config=ray.train.RunConfig(
            storage_path=storage_path,
            failure_config=ray.train.FailureConfig(max_failures=allowed_restarts(job, resume)),
        ),
    )
    try:
        # The fit runs in the cluster, because this process may be connected through ray://.
        result: dict[str, Any] = ray.get(ray.remote(num_cpus=0)(_fit).remote(trainer))
    except ray.exceptions.RayTaskError as error:
        words = str(error).strip().splitlines()
        raise Unavailable(f"training on Ray failed: {words[-1] if words else error!r}") from error
    if "refused" in result:
        raise error_of(*result["refused"])
    return result


def _check_paths(job: JobConfig) -> None:
    for setting, path in _paths(job):
        _check_everywhere(setting, path)


def _paths(job: JobConfig) -> Iterator[tuple[str, str]]:
    """Yields each option that names a file or a folder, but for those of a cluster of the job's own."""
    for which in ("train", "test"):
        yield from ((job.data.setting(which), path) for path in job.data.files(which))
    yield from _paths_of_stream(job)
    for name, options in job.features.items():
        yield f"features.{name}.vocabulary", options.get("vocabulary") or ""
    for name, table in job.tables.items():
        yield f"tables.{name}.weights", table.weights or ""
    checkpoint, elastic = job.train.checkpoint, job.train.elastic
    yield "train.checkpoint.url", "" if checkpoint is None else checkpoint.url
    yield "train.checkpoint.start_from", "" if checkpoint is None else checkpoint.start_from or ""
    yield "train.elastic.url", "" if elastic is None else elastic.url or ""
    yield "train.elastic.start_from", "" if elastic is None else elastic.start_from or ""
    yield "publish.root", job.publish.root or ""
    yield "metrics.file", job.metrics.file or ""
    yield "metrics.tensorboard", job.metrics.tensorboard or ""
    if "local" in job.publish.model_fields_set:
        yield "publish.local", job.publish.local or ""


def _paths_of_stream(job: JobConfig) -> Iterator[tuple[str, str]]:
    stream = job.data.stream
    if stream is None:
        return
    if stream.follow is not None:
        yield "data.stream.follow.files", stream.follow.files
    if stream.kafka is not None:
        yield "data.stream.kafka.options_file", stream.kafka.options_file or ""
        if stream.kafka.protobuf is not None:
            yield "data.stream.kafka.protobuf.descriptors", stream.kafka.protobuf.descriptors


def _check_everywhere(setting: str, path: str) -> None:
    if path and "://" not in path and not Path(path).is_absolute():
        raise InvalidArgument(
            f"{setting}: {path!r} is not allowed on Ray, where each worker runs in a folder of its own; allowed: "
            "an absolute path that all nodes have, or a URL"
        )


def problem_with_data(job: JobConfig) -> SparserowError | None:
    """Returns what keeps this node from reading the job's data, as far as its files show; None when nothing does."""
    from ...worker.data.sources import check_files
    from ...worker.training.build_model import check_data

    try:
        check_files(job.data, "train")
        check_data(job)  # also looks for the test files
    except SparserowError as error:
        return error
    return None


def _fit(trainer: Any) -> dict[str, Any]:
    result: dict[str, Any] = trainer.fit().return_value
    return result


def _work(order: dict[str, Any]) -> dict[str, Any]:
    """Runs one worker."""
    from ray import train

    from ...worker.training.process_group import WorkerGroup
    from ...worker.training.training_device import training_device
    from ...worker.training.training_report import Silence
    from ..train.training_run import run_worker

    use_security(order["security"])
    job = validate(JobConfig, order["job"])
    context = train.get_context()
    # Ray would restart a worker that raises, and no number of restarts brings a missing file.
    everyone = WorkerGroup(context.get_world_rank(), context.get_world_size())
    for problem in everyone.collect(_of_this_node(problem_with_data(job), context.get_node_rank())):
        if problem is not None:
            return {"refused": problem}
    wait_until_ready(order["coordinator"], _READY_SEC)
    # Ray shows each worker its own device alone.
    device = training_device(job.train, local_rank=0, local_world=1, world=context.get_world_size())
    group = WorkerGroup(
        context.get_world_rank(), context.get_world_size(), meets=job.train.dense == "ddp", device=device
    )
    result = run_worker(
        job,
        group,
        local_world=context.get_local_world_size(),
        coordinator=order["coordinator"],
        observer=Silence(),
        resume=order["resume"],
        run=order["run"],
        identity=RunIdentity(**order["identity"]),
    )
    return result.as_dict()


def _of_this_node(problem: SparserowError | None, node: int) -> tuple[int, str] | None:
    if problem is None:
        return None
    return problem.number, f"{problem} (on {os.uname().nodename}, node {node} of the run; every node needs the data)"
