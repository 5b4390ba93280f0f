"""Opens the readers of a job on every worker, by a plan that one worker makes for all, and gives them statistics.

The statistics are those of the namespace's rows. Where it has none yet, one worker takes them of the training files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...proto.config.job import JobConfig
from ...proto.features.feature_set import FeatureSet
from ...proto.features.kept import FeaturesPolicy
from ...proto.process.lone_work import lone_work
from ..api.session import Session
from ..data import Batch, ClickReader, FeatureSpec, FittedFeatures, NamedBatch, ReadOptions
from ..data.negatives import NegativeSampling
from ..data.sources import feature_set, fit_features, open_reader
from ..session.namespace_features import agreed_features
from .build_model import input_names
from .files_read import DataFiles, SavedRun
from .process_group import WorkerGroup
from .task_outputs import TaskOutputs

_TEST_BATCH = 8192


@dataclass(frozen=True)
class JobReaders:
    """The readers of a worker, which need :meth:`fit` before the first batch.

    Attributes:
        train: reads this worker's share of the training files.
        test: reads its share of the test files; all of them where the workers do not meet, as each tests alone.
        spec: the inputs of the model.
        files: what is known of the files, which is kept in the namespace.
    """

    train: ClickReader[NamedBatch]
    test: ClickReader[NamedBatch]
    spec: FeatureSpec
    files: DataFiles

    def fit(
        self,
        job: JobConfig,
        group: WorkerGroup,
        session: Session | None = None,
        *,
        policy: FeaturesPolicy = "keep",
    ) -> None:
        """Gives the readers the statistics of the features; every worker of the job calls it, after a restore.

        Args:
            job: the job.
            group: this worker and its peers.
            session: keeps the statistics in its namespace; None: those of the training files are taken.
            policy: what happens where the namespace has statistics of an earlier run; see :func:`agreed_features`.

        Raises:
            BadLine: a line or row that must be read for it is malformed, and such ones are not skipped.
            FailedPrecondition: a feature differs from that of an earlier run; the text names it.
        """
        self.files.keep()
        files = self.train.files

        def fitted(features: FeatureSet) -> FeatureSet:
            with lone_work.doing("statistics of the training files"):
                return features.with_statistics(fit_features(job.data, files, features.statistics).statistics)

        features = feature_set(job.data.features)
        if session is None:
            made = fitted(features).statistics if group.makes_shared else None
            found = group.share(made, what="statistics of the training files")
            features = features.with_statistics(found or {})
        else:
            features = agreed_features(session.core, features, fitted, policy=policy)
        numbers = [each.name for each in (*self.spec.dense, *self.spec.buckets)]
        taken = {name: features.statistics[name] for name in numbers if name in features.statistics}
        for reader in (self.train, self.test):
            reader.use(FittedFeatures(self.spec, taken))


def open_readers(
    job: JobConfig, group: WorkerGroup, session: Session | None = None, saved: SavedRun | None = None
) -> JobReaders:
    """Opens the readers; every worker of the job calls it.

    Args:
        job: the job.
        group: this worker and its peers.
        session: the session of this worker, whose namespace keeps what is read once; None: nothing is kept.
        saved: the checkpoint that the run goes on from; None: it begins at its beginning.

    Raises:
        BadLine: a line or row that must be read for it is malformed, and such ones are not skipped.
        NotFound, InvalidArgument, DataLoss, FailedPrecondition: a file cannot be read, or lacks a column.
    """
    files = DataFiles(job, group, None if session is None else session.core, saved)
    read = files.read()
    features, candidates = FittedFeatures(read.spec), read.candidates
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
        candidates=candidates,
    )
    testing = ReadOptions(
        batch_size=_TEST_BATCH,
        rank=group.rank if group.meets else 0,
        world=group.world if group.meets else 1,
        in_order=False,
        candidates=None if candidates is None else candidates.for_test(),
    )
    return JobReaders(
        open_reader(job.data, "train", features, training, read.train, made),
        open_reader(job.data, "test", features, testing, read.test, tested),
        read.spec,
        files,
    )


def _made_by(job: JobConfig, features: FittedFeatures, *, size: int, least: int) -> Callable[[Batch], NamedBatch]:
    """Returns what makes a batch for the job's model, after a check of its labels.

    Micro-batches have at most ``size`` samples; empty ones are added up to ``least``.
    """
    names, outputs = input_names(job.model, features.spec), TaskOutputs(job.all_tasks)

    def made(batch: Batch) -> NamedBatch:
        outputs.check(batch)
        return NamedBatch.of(batch, names, size, least=least)

    return made
