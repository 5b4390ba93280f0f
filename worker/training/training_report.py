"""The reports of a trainer: those that an observer gets while it runs, and the result of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from ..data.batch import TimeRange  # the package imports torch


@dataclass(frozen=True)
class EpochResult:
    """The result of one epoch.

    Attributes:
        epoch: the number of the epoch, from 1.
        train_loss: the mean loss over the samples of rank 0; with ``train.elastic`` over those of all workers.
        samples: the number of samples that all workers trained on.
        samples_per_sec: the rate of all workers together, without the evaluation.
        test_auc: the AUC on the test files after the epoch; NaN when it was not tested.
        test_log_loss: the log loss on the test files after the epoch, in nats; NaN when it was not tested.
        metrics: the metrics on the test files by ``TASK.METRIC``; {} when it was not tested.
        step: the number of steps of the run at the end of the epoch; 0 with ``train.elastic``.
    """

    epoch: int
    train_loss: float
    samples: int
    samples_per_sec: float
    test_auc: float
    test_log_loss: float
    metrics: dict[str, float] = field(default_factory=dict)
    step: int = 0


@dataclass(frozen=True)
class EvaluationPoint:
    """The result of a test within an epoch.

    Attributes:
        epoch: the number of the epoch, from 1.
        step: the number of steps of the run before it; where workers do not meet, of those of the first worker.
        samples: the number of samples of all workers in the epoch before it; where workers do not meet, an estimate.
        test_auc, test_log_loss, metrics: as in :class:`EpochResult`.
    """

    epoch: int
    step: int
    samples: int
    test_auc: float
    test_log_loss: float
    metrics: dict[str, float]


Evaluated: TypeAlias = EpochResult | EvaluationPoint


@dataclass(frozen=True)
class TrainResult:
    """The result of a run, which ``--json`` writes.

    Attributes:
        test_auc: the AUC on the test files after the last epoch; with ``metrics.best``, in the best test.
        test_log_loss: the log loss on the test files in that test, in nats.
        samples_per_sec: the rate over all epochs and workers, without evaluations.
        epochs: the number of epochs.
        rows: the rows of all tables that the servers hold at the end; with backend local all rows.
        shards: the number of shards at the end; 0 with backend local.
        workers: the number of workers at the end.
        seed: the seed of the job.
        bad_lines: the number of lines that were skipped in one pass over the training and the test files.
        first_bad_line: the place and the fault of one of them; None when there was none.
        backend: "ps" or "local".
        refused_steps: the number of steps that no worker took, because a loss or gradient had NaN or Inf.
        spikes: how often the job went back to a checkpoint, as its loss had jumped (``train.spike``).
        staleness: for each table, the number of pulls in train mode by bucket. A bucket's name is the largest number of
            steps that its pulls were stale, and "inf" is the last bucket. {} with backend local.
        cache: counts of all workers' row caches. Unique rows were hits, misses, revalidated (asked about by version) or
            refreshed (revalidated, and sent again); bytes_saved counts float32 weights. {} without a cache.
        tiers: counts of the shards with an SSD, from the run's start to its end; {} when no shard has an SSD. Keys of
            pulls and commits were hits in memory or misses, which are looked for on the SSD. brought_ahead counts keys
            that hints brought to memory, and rows_evicted those that left it. reads, rows_read, bytes_read, read_sec,
            writes, rows_written, bytes_written and write_sec describe the traffic of the SSD. file_bytes is the size of
            the files at the end.
        history: the results of the epochs; with ``metrics.stop`` the last one may be a part of an epoch.
        shard_restores: how often a shard of the cluster ended and was restored from a checkpoint while others went on.
        commits_lost: the number of commits that such shards had applied and no worker could send again. A commit is one
            worker's step on one shard.
        points: the results of the tests within epochs.
        workers_lost: the number of workers that were killed and that no other one replaced: what they had still to
            train on was left out.
        kept: the places that hold the trained model, one line each; () when its rows and its tower are gone.
        commands: shell commands that publish and serve the kept model, under the keys ``publish`` and ``serve``.
        best_epoch: with ``metrics.best``, the epoch after or within which the model that is kept or published was
            tested; else None.
        best_step: the number of steps of the run before that test; else None.
        best_checkpoint: the name of its checkpoint; else None.
        quorum: with ``train.quorum``, counts over all workers: refused_steps had their quorum when a worker was done
            with them, and missed_steps were over before it began them. {} without.
        stream: of a job that reads a stream, what became of its events in this run: events, dead, empty and lost, and
            of the events late and ahead where their times mean something; {} otherwise.
        device: the device of the first worker's tower, such as "cpu" or "cuda:0".
        problem: why the model was not published as the job says, though the run has ended; "": there was none.
    """

    test_auc: float
    test_log_loss: float
    samples_per_sec: float
    epochs: int
    rows: int
    shards: int
    workers: int
    seed: int
    bad_lines: int
    first_bad_line: str | None
    backend: str
    refused_steps: int
    staleness: dict[str, dict[str, int]]
    cache: dict[str, int]
    tiers: dict[str, float]
    history: tuple[EpochResult, ...]
    spikes: int = 0
    shard_restores: int = 0
    commits_lost: int = 0
    kept: tuple[str, ...] = ()
    commands: dict[str, str] = field(default_factory=dict)
    best_epoch: int | None = None
    best_step: int | None = None
    best_checkpoint: str | None = None
    quorum: dict[str, int] = field(default_factory=dict)
    stream: dict[str, int] = field(default_factory=dict)
    device: str = "cpu"
    problem: str = ""
    workers_lost: int = 0
    points: tuple[EvaluationPoint, ...] = ()

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics on the test files of the model that is kept or published; {} when it was not tested."""
        if self.best_epoch is None:
            return self.history[-1].metrics if self.history else {}
        place = (self.best_epoch, self.best_step)
        tests: tuple[Evaluated, ...] = (*self.history, *self.points)
        return next((each.metrics for each in tests if (each.epoch, each.step) == place), {})

    def as_dict(self) -> dict[str, Any]:
        """Returns the result as plain values, for JSON."""
        return asdict(self)


def merged(results: Sequence[TrainResult], *, workers_lost: int = 0) -> TrainResult:
    """Merges the results of workers without a process group into one result.

    Counts and rates are summed. The evaluation is that of the first worker, which is the only one that tests. A worker
    that joined late has no results of earlier epochs. With leased data, the history of worker 0 counts for all.

    Args:
        results: the results of the workers that have ended well, the first one's first.
        workers_lost: the number of the others.
    """
    first = results[0]
    by_epoch: dict[int, list[EpochResult]] = {}
    for each in (each for result in results for each in result.history):
        by_epoch.setdefault(each.epoch, []).append(each)
    history = [
        replace(
            epochs[0],
            samples=sum(epoch.samples for epoch in epochs),
            samples_per_sec=sum(epoch.samples_per_sec for epoch in epochs),
        )
        for _, epochs in sorted(by_epoch.items())
    ]
    return replace(
        first,
        samples_per_sec=sum(result.samples_per_sec for result in results),
        workers=len(results),
        workers_lost=workers_lost,
        bad_lines=sum(result.bad_lines for result in results),
        first_bad_line=next((result.first_bad_line for result in results if result.first_bad_line), None),
        refused_steps=sum(result.refused_steps for result in results),
        cache={name: sum(result.cache[name] for result in results) for name in first.cache},
        quorum={name: sum(result.quorum[name] for result in results) for name in first.quorum},
        history=tuple(history),
    )


class Observer(Protocol):
    """An object that a trainer informs of its progress. Only that of rank 0 shows anything."""

    def batch(self, *, epoch: int, done: float | None, samples: int, loss: float, auc: float) -> None:
        """Is called after some batches.

        Args:
            epoch: the present epoch, from 1.
            done: the share of the epoch that is done, in [0, 1]; None: not known.
            samples: the number of samples in this epoch so far, over all workers.
            loss: the mean loss of recent samples.
            auc: the AUC of recent samples.
        """
        ...

    def goes_on(self, results: Sequence[EpochResult]) -> None:
        """Is called before the first step of a run that goes on from a checkpoint, with the results of its epochs."""
        ...

    def window(self, epoch: int, samples: int, metrics: Mapping[str, float], times: TimeRange | None = None) -> None:
        """Is called after each window of ``metrics.progressive``.

        Args:
            epoch: the present epoch, from 1.
            samples: the number of samples in this epoch so far, over all workers.
            metrics: the metrics of the samples of the window, by name.
            times: the times of the first and the last of them, microseconds since 1970 in UTC; None: they have none.
        """
        ...

    def evaluating(self, epoch: int) -> None:
        """Is called when the evaluation of an epoch begins."""
        ...

    def point(self, result: EvaluationPoint) -> None:
        """Is called after a test within an epoch."""
        ...

    def epoch(self, result: EpochResult) -> None:
        """Is called when an epoch has ended."""
        ...


class Silence:
    """An observer that shows nothing. All ranks but the first use it."""

    def batch(self, *, epoch: int, done: float | None, samples: int, loss: float, auc: float) -> None:
        """Does nothing."""

    def goes_on(self, results: Sequence[EpochResult]) -> None:
        """Does nothing."""

    def window(self, epoch: int, samples: int, metrics: Mapping[str, float], times: TimeRange | None = None) -> None:
        """Does nothing."""

    def evaluating(self, epoch: int) -> None:
        """Does nothing."""

    def point(self, result: EvaluationPoint) -> None:
        """Does nothing."""

    def epoch(self, result: EpochResult) -> None:
        """Does nothing."""


def why_undefined(metrics: Mapping[str, float], name: str) -> str | None:
    """Returns why a metric of the test files is not a number, though their samples were scored; None where it is one,
    or nothing was scored.

    Args:
        metrics: the metrics of an epoch.
        name: the name of the metric, as TASK.METRIC.
    """
    task, _, metric = name.partition(".")
    of_classes = metric in ("auc", "gauc", "normalized_entropy") and math.isnan(metrics.get(name, 0.0))
    if not of_classes or math.isnan(metrics.get(f"{task}.log_loss", math.nan)):
        return None
    if metric == "gauc" and not math.isnan(metrics.get(f"{task}.auc", math.nan)):
        return "no group of the test data has both classes"
    return "the test data have one class alone"
