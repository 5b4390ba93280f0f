"""Opens the readers of a job on every worker, by a plan and statistics that worker 0 makes for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...proto.config.job import JobConfig
from ..data import ClickReader, Features, PlannedFile, ReadOptions
from ..data.sources import fit_features, open_reader, plan_files
from .process_group import WorkerGroup

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
    features: Features


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
    shuffle_rows = job.data.shuffle_rows
    training = ReadOptions(
        batch_size=job.train.batch_size * job.train.accumulate,
        rank=group.rank,
        world=group.world,
        shuffle=shuffle_rows > 0,
        shuffle_rows=max(shuffle_rows, 1),
        seed=job.train.seed,
    )
    testing = ReadOptions(
        batch_size=_TEST_BATCH,
        rank=group.rank if group.meets else 0,
        world=group.world if group.meets else 1,
        in_order=False,
    )
    return JobReaders(
        open_reader(job.data, "train", features, training, train),
        open_reader(job.data, "test", features, testing, test),
        features,
    )


def _shared(group: WorkerGroup, plan: Sequence[PlannedFile]) -> Sequence[PlannedFile]:
    """Returns the plan of worker 0."""
    return group.share(plan)
