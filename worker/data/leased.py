"""Batches of the parts of an epoch that the coordinator leases to this worker, for workers that come and go.

A *chunk* is a run of whole lines of one file: every worker cuts the files alike. Which worker trains on a chunk is
decided when it asks; the batches of a chunk are the same for every worker, a pure function of (seed, epoch, chunk).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ...proto.errors import InvalidArgument
from .batch import Batch
from .line_windows import LinePosition, read_windows
from .reader import ClickReader

_POLL_SEC = 0.1


@dataclass(frozen=True)
class Chunk:
    """Lines of a file."""

    file: int
    place: LinePosition
    lines: int


@dataclass(frozen=True)
class Trained:
    """What workers of a run trained on in an epoch.

    Attributes:
        samples: batches that were left out, as the rows had them, included.
        measured: of these, samples whose loss is in ``loss_sum``.
        loss_sum: of losses.
        seconds: that workers took, added up.
    """

    samples: int = 0
    measured: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class EpochScore:
    """What worker 0 told after an epoch: samples a second of all workers, and how good the model was."""

    samples_per_sec: float
    auc: float
    log_loss: float


@dataclass(frozen=True)
class Leased:
    """What a worker gets.

    Attributes:
        chunk: None: none now.
        skip: batches of it to leave out.
        is_over: all chunks of the epoch are done.
        epoch: that is under way; 0: not told.
        trained: in the epoch that is over, by all workers of the run; None: not known.
        tested: of that epoch; None: not known, or not tested yet.
    """

    chunk: int | None
    skip: int = 0
    is_over: bool = False
    epoch: int = 0
    trained: Trained | None = None
    tested: EpochScore | None = None


class Leases(Protocol):
    """Where chunks come from."""

    def lease(self, epoch: int, chunks: int, done: list[int], trained: Trained | None = None) -> Leased:
        """Says what is done, and asks for more."""

    def tell_tested(self, epoch: int, chunks: int, tested: EpochScore) -> None:
        """Says how good the model was after an epoch that is over."""


class LeasedReader:
    """An iterable of :class:`Batch`; each ``iter()`` is what this worker gets of one epoch. Not thread-safe.

    A batch must be trained on, and its commit sent, when the next one is asked for.

    Args:
        reader: decodes; its files are those of the epoch, its options give batch size, shuffling and seed.
        lease_rows: lines of a chunk, rounded up to whole batches.
        leases: where chunks come from.
        settle: returns when all commits of this worker are acknowledged.
        fills: whether to yield an empty batch while others have the last chunks, so that no worker waits for this one's
            step; else it only waits.
    """

    def __init__(
        self, reader: ClickReader, *, lease_rows: int, leases: Leases, settle: Callable[[], None], fills: bool
    ) -> None:
        self._reader, self._leases, self._settle, self._fills = reader, leases, settle, fills
        size = reader.options.batch_size
        self._lines = -(-lease_rows // size) * size
        self._chunks = [
            Chunk(index, window.place, window.lines)
            for index in range(len(reader.files))
            for window in reader.windows(index, self._lines)
            if not window.text.isspace()
        ]
        if not self._chunks:
            raise InvalidArgument(f"{reader.files[0].path}: no data lines")
        self._epoch = 0
        self._done = 0
        self._came_late = False
        self._sums: Callable[[], Trained] = Trained
        self._skipped = 0
        self._end: Leased | None = None

    @property
    def end(self) -> Leased | None:
        """What the last epoch's end said of its samples and its test; None before one has ended."""
        return self._end

    @property
    def came_late(self) -> bool:
        """Whether a later epoch was under way already when this worker asked for the last one."""
        return self._came_late

    @property
    def done(self) -> float | None:
        """Chunks of the epoch that this worker has done, as a share of all, in [0, 1]."""
        return self._done / len(self._chunks)

    def begin_at(self, epoch: int, sums: Callable[[], Trained] = Trained) -> None:
        """The next ``iter()`` is of this epoch.

        Args:
            epoch: from 1.
            sums: what this worker has trained on in the epoch when it is called.
        """
        self._epoch, self._sums = epoch - 1, sums

    def tell_tested(self, tested: EpochScore) -> None:
        """Says how good the model was after the epoch that has ended last."""
        self._leases.tell_tested(self._epoch, len(self._chunks), tested)

    def __iter__(self) -> Iterator[Batch]:
        self._epoch += 1
        self._done = 0
        self._came_late, self._end = False, None
        self._skipped = 0
        told = Trained()
        order = np.arange(len(self._chunks))
        if self._reader.options.shuffle:
            order = np.random.default_rng([self._reader.options.seed, self._epoch]).permutation(order)
        finished: list[int] = []
        while True:
            trained = None
            if finished:
                self._settle()
                now = self._trained()
                trained, told = _between(told, now), now
            leased = self._leases.lease(self._epoch, len(self._chunks), finished, trained)
            finished = []
            if leased.is_over:
                self._end = leased
                self._came_late = leased.epoch > self._epoch and self._done == 0
                return
            if leased.chunk is not None:
                yield from self._batches(int(order[leased.chunk]), leased.skip)
                finished = [leased.chunk]
                self._done += 1
            elif self._fills:
                yield self._reader.empty_batch()
            else:
                time.sleep(_POLL_SEC)

    def _batches(self, number: int, skip: int) -> Iterator[Batch]:
        chunk, reader = self._chunks[number], self._reader
        window = next(read_windows(reader.files[chunk.file].path, chunk.lines, chunk.place))
        for index, batch in enumerate(reader.batches_of(chunk.file, window, [self._epoch, number])):
            if index >= skip:
                yield batch
            else:
                self._skipped += len(batch)

    def _trained(self) -> Trained:
        """By this worker in the epoch so far, with the batches whose rows had them already."""
        sums = self._sums()
        return replace(sums, samples=sums.samples + self._skipped)


def _between(before: Trained, now: Trained) -> Trained:
    return Trained(
        now.samples - before.samples,
        now.measured - before.measured,
        now.loss_sum - before.loss_sum,
        now.seconds - before.seconds,
    )
