"""What a trainer tells while it runs, and the result it ends with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol


@dataclass(frozen=True)
class EpochResult:
    """One epoch.

    Attributes:
        epoch: from 1.
        train_loss: mean over the samples of rank 0; of all workers with ``train.elastic``.
        samples: trained on by all workers.
        samples_per_sec: of all workers, without the evaluation.
        test_auc, test_log_loss: after the epoch.
    """

    epoch: int
    train_loss: float
    samples: int
    samples_per_sec: float
    test_auc: float
    test_log_loss: float


@dataclass(frozen=True)
class TrainResult:
    """What ``--json`` writes.

    Attributes:
        test_auc, test_log_loss: after the last epoch.
        samples_per_sec: over all epochs and workers, without evaluations.
        epochs: how many.
        rows: of all tables that the servers hold at the end (all rows, with backend local).
        shards, workers: processes of each kind that were there to the end; no shards with backend local.
        seed: the job's.
        bad_lines: skipped in one pass over the training and the test files.
        first_bad_line: the place and fault of one of them, if any.
        backend: ps or local.
        staleness: of pulls in train mode, by table: how many were at most so many steps stale, and staler than the
            bucket before ("inf" is the last); {} with backend local.
        cache: of all workers' row caches: unique rows that were hits, misses, revalidated (asked about by version) and
            refreshed (of those: sent again), and bytes_saved, of float32 weights; {} without a cache.
        tiers: of shards with an SSD, from the run's start to its end: keys of pulls and commits that were hits (in
            memory) and misses (looked for on the SSD), keys brought_ahead by hints, rows_evicted from memory, and what
            was read and written there (reads, rows_read, bytes_read, read_sec; writes, rows_written, bytes_written,
            write_sec), and file_bytes at the end; {} without one.
        refused_steps: steps that no worker took because a loss or gradient of one had NaN or Inf.
        history: the epochs.
        shard_restores: how often a shard of the cluster ended and came back from a checkpoint while others went on.
        commits_lost: commits that such shards had taken and no worker could send again; each is a worker's step on one
            shard.
        kept: where the trained model is, a line for each place; () where its rows and its tower are gone.
        commands: of the shell, that publish and serve what was kept, by ``publish`` and ``serve``.
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
    shard_restores: int = 0
    commits_lost: int = 0
    kept: tuple[str, ...] = ()
    commands: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def merged(results: Sequence[TrainResult]) -> TrainResult:
    """One result of workers that never met: sums of what each did, and the evaluation of the first, which tested.

    A worker that came later has no results of the epochs before. With leased data those of worker 0 count for all.
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
        bad_lines=sum(result.bad_lines for result in results),
        first_bad_line=next((result.first_bad_line for result in results if result.first_bad_line), None),
        refused_steps=sum(result.refused_steps for result in results),
        cache={name: sum(result.cache[name] for result in results) for name in first.cache},
        history=tuple(history),
    )


class Observer(Protocol):
    """Watches a trainer on rank 0."""

    def batch(self, *, epoch: int, done: float | None, samples: int, loss: float, auc: float) -> None:
        """After some batches: share of the epoch done (None: not known), samples so far, loss and AUC of late."""
        ...

    def evaluating(self, epoch: int) -> None:
        """An evaluation begins."""
        ...

    def epoch(self, result: EpochResult) -> None:
        """An epoch has ended."""
        ...


class Silence:
    """An observer that shows nothing: of all ranks but the first."""

    def batch(self, *, epoch: int, done: float | None, samples: int, loss: float, auc: float) -> None:
        """Nothing."""

    def evaluating(self, epoch: int) -> None:
        """Nothing."""

    def epoch(self, result: EpochResult) -> None:
        """Nothing."""
