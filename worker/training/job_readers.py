"""Opens the readers of a job on every worker, by a plan and statistics that worker 0 makes for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...proto.config.job import JobConfig
from ..data import Batch, ClickReader, FittedFeatures, NamedBatch, PlannedFile, ReadOptions, StepBatch
from ..data.negatives import NegativeSampling
from ..data.sources import fit_features, open_reader, plan_files
from .build_model import input_names
from .process_group import WorkerGroup
from .task_outputs import TaskOutputs

_TEST_BATCH = 8192


@dataclass(frozen=True)
class JobReaders:
    """The readers of a worker.

    Attributes:
        train: reads this worker's share of the training files.
        test: reads its share of the test files; all of them where the workers do not meet, as each tests alone.
        features: the transforms, with the statistics of the training files.
    """

    train: ClickReader
    test: ClickReader
    features: FittedFeatures


def open_readers(job: JobConfig, group: WorkerGroup) -> JobReaders:
    """Opens the readers; every worker of the job calls it.

    Raises:
        BadLine: a line or row that must be read for it is malformed, and such ones are not skipped.
        NotFound, InvalidArgument, DataLoss, FailedPrecondition: a file cannot be read, or lacks a column.
    """
    train = _shared(group, plan_files(job.data, "train") if group.makes_shared else ())
    features = group.share(fit_features(job.data, train) if group.makes_shared else None)
    test = _shared(group, plan_files(job.data, "test") if group.makes_shared else ())
    assert features is not None
    made = _made_by(job, features, size=job.train.batch_size, least=job.train.accumulate)
    tested = _made_by(job, features, size=_TEST_BATCH, least=1)
    shuffle_rows, keep = job.data.shuffle_rows, job.data.negatives_keep
    training = ReadOptions(
        batch_size=job.train.batch_size * job.train.accumulate,
        rank=group.rank,
        world=group.world,
        shuffle=shuffle_rows > 0,
        shuffle_rows=max(shuffle_rows, 1),
        seed=job.train.seed,
        negatives=None if keep == 1 else NegativeSampling(keep, job.train.seed),
    )
    testing = ReadOptions(
        batch_size=_TEST_BATCH,
        rank=group.rank if group.meets else 0,
        world=group.world if group.meets else 1,
        in_order=False,
    )
    return JobReaders(
        open_reader(job.data, "train", features, training, train, made),
        open_reader(job.data, "test", features, testing, test, tested),
        features,
    )


def _made_by(job: JobConfig, features: FittedFeatures, *, size: int, least: int) -> Callable[[Batch], StepBatch]:
    """Returns what makes a batch for the job's model, after a check of its labels.

    Args:
        job: the job.
        features: the transforms.
        size: the number of samples of a micro-batch.
        least: the least number of micro-batches.
    """
    names, outputs = input_names(job.model, features.spec), TaskOutputs(job.all_tasks)

    def made(batch: Batch) -> StepBatch:
        outputs.check(batch)
        return batch if names is None else NamedBatch.of(batch, names, size, least=least)

    return made


def _shared(group: WorkerGroup, plan: Sequence[PlannedFile]) -> Sequence[PlannedFile]:
    """Returns the plan of worker 0."""
    return group.share(plan)
