"""Reads the windows of an epoch that the coordinator leases to this worker, so that workers may join and leave.

A chunk that is leased is a window of the epoch's order (``sample_order.py``), which is the same for every worker. The
coordinator decides which worker trains on a window when a worker asks for one. The batches of a window are the same for
every worker: they are a pure function of (seed, epoch, window).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, Protocol

from .reader import ClickReader, Made
from .sample_order import SampleOrder

_POLL_SEC = 0.1


@dataclass(frozen=True)
class Trained:
    """Sums over the samples that workers of a run trained on in an epoch.

    Attributes:
        samples: the number of samples, including batches that were skipped because the rows had them already.
        measured: the number of those samples whose loss is in ``loss_sum``.
        loss_sum: the sum of the losses.
        seconds: the time that the workers took, added up, in seconds.
    """

    samples: int = 0
    measured: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class EpochScore:
    """The figures that worker 0 reports after an epoch.

    Attributes:
        samples_per_sec: the rate of all workers together.
        auc: the AUC on the test files.
        log_loss: the log loss on the test files, in nats.
    """

    samples_per_sec: float
    auc: float
    log_loss: float


@dataclass(frozen=True)
class Leased:
    """The coordinator's answer to a worker that asks for a chunk.

    Attributes:
        chunk: the number of the leased chunk; None: there is no chunk for this worker now.
        skip: the number of batches at its beginning to skip, because the rows have them already.
        is_over: whether all chunks of the epoch are done.
        epoch: the number of the epoch that is under way.
        trained: the sums of all workers over the epoch that is over; None: not known.
        tested: the figures of that epoch; None: not known, or not tested yet.
    """

    chunk: int | None
    skip: int = 0
    is_over: bool = False
    epoch: int = 0
    trained: Trained | None = None
    tested: EpochScore | None = None


class Leases(Protocol):
    """A source of leased chunks, such as the coordinator."""

    def lease(self, epoch: int, chunks: int, done: list[int], trained: Trained | None = None) -> Leased:
        """Reports finished chunks and sums, and asks for another chunk."""

    def report_tested(self, epoch: int, chunks: int, tested: EpochScore) -> None:
        """Reports the figures of an epoch that is over."""


class LeasedReader(Generic[Made]):
    """An iterable of batches; each ``iter()`` yields this worker's chunks of one epoch. Not thread-safe.

    Before the caller asks for the next batch, it must have trained on the last one and sent its commit.

    Args:
        reader: decodes the samples; it has the files of the epoch, the batch size, the shuffling and the seed.
        lease_rows: the number of samples of a window, rounded up to whole batches.
        leases: the source of chunks.
        settle: returns when all commits of this worker are acknowledged.
        fills: whether to yield empty batches while other workers have the last chunks, so that no worker waits for
            this worker's steps. False: the reader only waits.
    """

    def __init__(
        self, reader: ClickReader[Made], *, lease_rows: int, leases: Leases, settle: Callable[[], None], fills: bool
    ) -> None:
        self._reader, self._leases, self._settle, self._fills = reader, leases, settle, fills
        size = reader.options.batch_size
        self._window_rows = -(-lease_rows // size) * size
        self._windows = -(-reader.order(0, self._window_rows).samples // self._window_rows)
        self._epoch = 0
        self._done = 0
        self._came_late = False
        self._sums: Callable[[], Trained] = Trained
        self._skipped = 0
        self._end: Leased | None = None

    @property
    def end(self) -> Leased | None:
        """The coordinator's answer at the end of the last epoch; None before an epoch has ended."""
        return self._end

    @property
    def came_late(self) -> bool:
        """Whether a later epoch was already under way when this worker asked for the last one."""
        return self._came_late

    @property
    def done(self) -> float | None:
        """The share of the epoch's windows that this worker has done, in [0, 1]."""
        return self._done / self._windows

    def begin_at(self, epoch: int, sums: Callable[[], Trained] = Trained) -> None:
        """Sets the epoch that the next ``iter()`` reads.

        Args:
            epoch: the number of the epoch, from 1.
            sums: returns the sums of this worker over the epoch so far.
        """
        self._epoch, self._sums = epoch - 1, sums

    def report_tested(self, tested: EpochScore) -> None:
        """Reports the figures of the epoch that ended last."""
        self._leases.report_tested(self._epoch, self._windows, tested)

    def __iter__(self) -> Iterator[Made]:
        self._epoch += 1
        self._done = 0
        self._came_late, self._end = False, None
        self._skipped = 0
        reported = Trained()
        order = self._reader.order(self._epoch, self._window_rows)
        finished: list[int] = []
        while True:
            trained = None
            if finished:
                self._settle()
                now = self._trained()
                trained, reported = _between(reported, now), now
            leased = self._leases.lease(self._epoch, self._windows, finished, trained)
            finished = []
            if leased.is_over:
                self._end = leased
                self._came_late = leased.epoch > self._epoch and self._done == 0
                return
            if leased.chunk is not None:
                yield from self._batches(order, leased.chunk, leased.skip)
                finished = [leased.chunk]
                self._done += 1
            elif self._fills:
                yield self._reader.empty_batch()
            else:
                time.sleep(_POLL_SEC)

    def _batches(self, order: SampleOrder, window: int, skip: int) -> Iterator[Made]:
        _, begin, end = order.window_of(window * self._window_rows)
        for index, batch in enumerate(self._reader.batches_of(order, begin, end)):
            if index >= skip:
                yield batch
            else:
                self._skipped += len(batch)

    def _trained(self) -> Trained:
        """Returns this worker's sums over the epoch so far, including skipped batches."""
        sums = self._sums()
        return replace(sums, samples=sums.samples + self._skipped)


def _between(before: Trained, now: Trained) -> Trained:
    return Trained(
        now.samples - before.samples,
        now.measured - before.measured,
        now.loss_sum - before.loss_sum,
        now.seconds - before.seconds,
    )
