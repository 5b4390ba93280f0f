"""Reads a worker's share of a click log in batches, in a shuffled order that can be resumed.

Samples are dealt by the same rules for every world size:

* A file is read in *windows* of ``window_lines`` lines (a multiple of batch_size x world). A window is the buffer of
  the shuffle. With shuffling, the samples of a window are permuted, and so is the order of the files.
* Each window is cut into ``world`` runs of lines, whose sizes differ by at most one. A rank decodes only its own run;
  the run that a rank gets rotates with the epoch.
* Each rank yields ceil(ceil(lines / world) / batch_size) batches of a window, however many lines were blank or bad. So
  all ranks take part in every step. Batches at a window's end may be short or empty.

Every order is a pure function of (seed, epoch, window, rank).
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from ...proto.errors import InvalidArgument, not_allowed
from .bad_line import BadLine, BadLinePolicy
from .batch import Batch
from .features import Features
from .formats import FileFormat
from .line_decoder import LineDecoder, Lines
from .line_windows import LinePosition, LineWindow, read_windows

_STATE_VERSION = 1
_FILE_START = LinePosition()


@dataclass(frozen=True)
class DataFile:
    """A file to read.

    Attributes:
        path: the path of the file.
        format: the format of the file.
    """

    path: str
    format: FileFormat


@dataclass(frozen=True)
class ReadOptions:
    """Options by which a reader deals samples.

    Attributes:
        batch_size: the number of samples in a batch of one rank.
        rank: the rank of this worker.
        world: the number of workers.
        shuffle: whether samples and files are shuffled.
        shuffle_rows: the size of the shuffle buffer in lines, over all ranks. It is rounded up to a multiple of
            batch_size x world.
        seed: the seed of every order.
        on_bad_line: "error" raises at a malformed line; "skip" drops and counts it.
    """

    batch_size: int
    rank: int = 0
    world: int = 1
    shuffle: bool = False
    shuffle_rows: int = 1 << 17
    seed: int = 0
    on_bad_line: Literal["error", "skip"] = "error"

    def __post_init__(self) -> None:
        checks = (
            ("batch_size", self.batch_size, ">= 1", self.batch_size >= 1),
            ("world", self.world, ">= 1", self.world >= 1),
            ("rank", self.rank, f"[0, {self.world})", 0 <= self.rank < self.world),
            ("shuffle_rows", self.shuffle_rows, ">= 1", self.shuffle_rows >= 1),
            ("seed", self.seed, ">= 0", self.seed >= 0),
            ("on_bad_line", self.on_bad_line, "error, skip", self.on_bad_line in ("error", "skip")),
        )
        for name, value, allowed, ok in checks:
            if not ok:
                raise not_allowed(f"ReadOptions.{name}", value, allowed)

    @property
    def window_lines(self) -> int:
        """The number of lines of a window."""
        step = self.batch_size * self.world
        return -(-self.shuffle_rows // step) * step


@dataclass(frozen=True)
class _Cursor:
    """The position of the next batch: its epoch, place in the epoch's file order, window, and number in the window."""

    epoch: int = 0
    file: int = 0
    window: int = 0
    place: LinePosition = _FILE_START
    batch: int = 0


class ClickReader:
    """An iterable of :class:`Batch`; each ``iter()`` is one epoch. Not thread-safe.

    Like torchdata's stateful loaders, ``state_dict`` between two batches describes the next batch. A reader of the same
    files and options that loads the state continues there; its first ``iter()`` yields the rest of that epoch. When a
    pass is left early and no state is loaded, the next pass starts the epoch again.

    Args:
        files: the files, at least one.
        features: the transforms of the samples.
        options: the options by which samples are dealt.

    Raises:
        InvalidArgument: there are no files.
    """

    def __init__(self, files: Sequence[DataFile], features: Features, options: ReadOptions) -> None:
        if not files:
            raise not_allowed("ClickReader.files", [], "at least one file")
        self._files = tuple(files)
        self._decoders = tuple(LineDecoder(file.format.layout) for file in files)
        self._features = features
        self._options = options
        self._next = _Cursor()
        self._resume = False
        self._policy = BadLinePolicy(options.on_bad_line)
        self._bad_lines_before_window = 0
        self._done: float | None = None
        self._file_begins: list[int] | None = None  # cumulative bytes in the pass's file order, then the total

    @property
    def files(self) -> tuple[DataFile, ...]:
        """The files that are read."""
        return self._files

    @property
    def options(self) -> ReadOptions:
        """The options by which samples are dealt."""
        return self._options

    @property
    def features(self) -> Features:
        """The transforms in use."""
        return self._features

    @property
    def epoch(self) -> int:
        """The number of epochs completed so far."""
        return self._next.epoch

    @property
    def done(self) -> float | None:
        """The share of the current pass that was yielded, in [0, 1]; None with gzip files, whose size is not known."""
        return self._done

    @property
    def bad_lines(self) -> int:
        """The number of lines that this rank has skipped in the current pass, or in the last one."""
        return self._policy.count

    @property
    def first_bad_line(self) -> BadLine | None:
        """The first line that was skipped in that pass; None: no line was skipped."""
        return self._policy.first

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the next batch and the statistics of the transforms, as plain numbers and lists."""
        cursor = self._next
        return {
            "version": _STATE_VERSION,
            "epoch": cursor.epoch,
            "file": cursor.file,
            "window": cursor.window,
            "offset": cursor.place.offset,
            "line": cursor.place.line,
            "batch": cursor.batch,
            "bad_lines": self._bad_lines_before_window if cursor.batch else self._policy.count,
            "features": self._features.state(),
            "dealt": self._dealt(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state that :meth:`state_dict` returned. On an error nothing changes.

        Raises:
            InvalidArgument: the state is of a reader with other files or options.
        """
        if state.get("version") != _STATE_VERSION:
            raise not_allowed("reader state.version", state.get("version"), str(_STATE_VERSION))
        mine = self._dealt()
        for name, value in mine.items():
            if state["dealt"].get(name) != value:
                raise InvalidArgument(
                    f"reader state: {name} was {state['dealt'].get(name)!r}; this reader has {value!r}, so it would "
                    "deal samples differently"
                )
        place = LinePosition(state["offset"], state["line"])
        self._next = _Cursor(state["epoch"], state["file"], state["window"], place, state["batch"])
        self._features = Features.from_state(self._features.spec, state["features"])
        self._policy.count, self._policy.first = state["bad_lines"], None
        self._resume = True

    def __iter__(self) -> Iterator[Batch]:
        if not self._resume:
            self._next = _Cursor(epoch=self._next.epoch)
            self._policy.count, self._policy.first = 0, None
        self._resume = False
        found_lines = self._next != _Cursor(epoch=self._next.epoch)
        order = self._file_order()
        self._file_begins = _cumulative_bytes([self._files[index].path for index in order])
        while self._next.file < len(order):
            index = order[self._next.file]
            for window in self._windows(index):
                found_lines = found_lines or not window.text.isspace()
                yield from self._batches(index, window)
            self._next = _Cursor(self._next.epoch, self._next.file + 1)
        if not found_lines:
            raise InvalidArgument(f"{self._files[0].path}: no data lines")
        self._next = _Cursor(epoch=self._next.epoch + 1)

    def raw_lines(self) -> Iterator[Lines]:
        """Yields all lines of all files, those of every rank, untransformed and in file order, for ``features.fit``.

        The position of the reader does not change. Bad lines raise, or are skipped without a count, by
        ``on_bad_line``.
        """
        policy = BadLinePolicy(self._policy.on_bad_line)
        for file, decoder in zip(self._files, self._decoders, strict=True):
            for window in read_windows(file.path, self._options.window_lines, _begin(file)):
                yield decoder.decode(window, policy)

    def windows(self, index: int, lines: int) -> Iterator[LineWindow]:
        """Yields all lines of a file after its header; the position of the reader does not change.

        Args:
            index: the number of the file.
            lines: the number of lines of a window.
        """
        return read_windows(self._files[index].path, lines, _begin(self._files[index]))

    def batches_of(self, index: int, window: LineWindow, order: Sequence[int]) -> Iterator[Batch]:
        """Yields the batches of a window; their order is a pure function of the seed and ``order``.

        The position of the reader does not change, but its count of bad lines does.

        Args:
            index: the number of the window's file.
            window: the window.
            order: numbers that seed the shuffle together with the reader's seed.
        """
        lines = self._decoders[index].decode(window, self._policy)
        if self._options.shuffle:
            lines = lines.take(np.random.default_rng([self._options.seed, *order]).permutation(len(lines)))
        whole = self._batch(lines)
        for begin in range(0, len(whole), self._options.batch_size):
            part = slice(begin, begin + self._options.batch_size)
            yield Batch(whole.dense[part], whole.sparse[part], whole.labels[part])

    def empty_batch(self) -> Batch:
        """Returns a batch without samples."""
        window = LineWindow(self._files[0].path, _FILE_START, b"", 0)
        return self._batch(self._decoders[0].decode(window, self._policy))

    def _batch(self, lines: Lines) -> Batch:
        features = self._features
        return Batch(
            torch.from_numpy(features.dense(lines)),
            torch.from_numpy(features.sparse(lines)),
            torch.from_numpy(lines.labels),
        )

    def _dealt(self) -> dict[str, Any]:
        options = self._options
        return {
            "files": [file.path for file in self._files],
            "batch_size": options.batch_size,
            "rank": options.rank,
            "world": options.world,
            "shuffle": options.shuffle,
            "window_lines": options.window_lines,
            "seed": options.seed,
        }

    def _file_order(self) -> list[int]:
        if not self._options.shuffle:
            return list(range(len(self._files)))
        random = np.random.default_rng([self._options.seed, self._next.epoch])
        return [int(index) for index in random.permutation(len(self._files))]

    def _windows(self, index: int) -> Iterator[LineWindow]:
        file = self._files[index]
        begin = self._next.place if self._next.window or self._next.batch else _begin(file)
        yield from read_windows(file.path, self._options.window_lines, begin)

    def _batches(self, index: int, window: LineWindow) -> Iterator[Batch]:
        options, now = self._options, self._next
        run = window.span((options.rank + now.epoch) % options.world, options.world)
        self._bad_lines_before_window = self._policy.count
        lines = self._decoders[index].decode(run, self._policy)
        if options.shuffle:
            random = np.random.default_rng([options.seed, now.epoch, now.file, now.window, options.rank])
            lines = lines.take(random.permutation(len(lines)))
        whole = self._batch(lines)
        count = math.ceil(math.ceil(window.lines / options.world) / options.batch_size)
        for batch in range(now.batch, count):
            part = slice(batch * options.batch_size, (batch + 1) * options.batch_size)
            if batch + 1 < count:
                self._next = _Cursor(now.epoch, now.file, now.window, window.place, batch + 1)
            else:
                self._next = _Cursor(now.epoch, now.file, now.window + 1, window.end)
            if self._file_begins is not None:
                at = self._file_begins[now.file] + window.place.offset + len(window.text) * (batch + 1) / count
                self._done = at / self._file_begins[-1]
            yield Batch(whole.dense[part], whole.sparse[part], whole.labels[part])


def _begin(file: DataFile) -> LinePosition:
    """Returns the position of the first data line, after the header if there is one."""
    return LinePosition(offset=_header_bytes(file.path), line=2) if file.format.header else _FILE_START


def _header_bytes(path: str) -> int:
    for window in read_windows(path, 1):
        return len(window.text)
    return 0


def _cumulative_bytes(paths: list[str]) -> list[int] | None:
    if any(path.endswith(".gz") for path in paths):
        return None
    return list(itertools.accumulate((os.path.getsize(path) for path in paths), initial=0))
