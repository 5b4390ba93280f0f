"""Reads a worker's share of a click log in batches, in a shuffled order that can be resumed by any number of workers.

The order of an epoch's samples is a pure function of (seed, epoch) (``sample_order.py``). Workers share it out by
closed forms (``dealing.py``), so every worker knows where all of them are. All take equally many steps in an epoch,
whatever the sizes of the files. The last batches may be short or empty, and a malformed sample makes its batch shorter.

A position is what was left of the epoch's order when its samples were last dealt, and the number of batches since
then. The same number of workers goes on with the same batches; another number deals what is left anew.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from ...proto.errors import InvalidArgument, not_allowed
from .bad_line import BadLine
from .batch import Batch
from .candidates import CandidateSampler
from .dealing import Dealing, Interval
from .decoded import Lines
from .features import FittedFeatures
from .kept_spec import check_inputs, check_targets
from .lines_to_batch import batch_of
from .named_batch import NamedBatch
from .negatives import NegativeSampling
from .part_reader import PartReader, Samples
from .sample_order import SampleOrder
from .source import PlannedFile, Source, no_samples

_STATE_VERSION = 3
Made = TypeVar("Made", bound="Batch | NamedBatch")


@dataclass(frozen=True)
class ReadOptions:
    """Options by which a reader deals samples.

    Attributes:
        batch_size: the number of samples in a batch of one rank.
        rank: the rank of this worker.
        world: the number of workers.
        shuffle: whether samples, parts of files and files are shuffled.
        shuffle_rows: with shuffle, the number of samples of a window, which are shuffled together.
        seed: the seed of every order.
        negatives: leaves out a share of the negatives, so that batches are shorter; None: all are kept.
        candidates: draws negatives beside each sample's item; None: none are drawn.
        in_order: without shuffle, whether a step takes the next world x batch_size samples of the files; False: each
            worker has a run of samples of its own, which it reads alone.
    """

    batch_size: int
    rank: int = 0
    world: int = 1
    shuffle: bool = False
    shuffle_rows: int = 1 << 17
    seed: int = 0
    in_order: bool = True
    negatives: NegativeSampling | None = None
    candidates: CandidateSampler | None = None

    def __post_init__(self) -> None:
        checks = (
            ("batch_size", self.batch_size, ">= 1", self.batch_size >= 1),
            ("world", self.world, ">= 1", self.world >= 1),
            ("rank", self.rank, f"[0, {self.world})", 0 <= self.rank < self.world),
            ("shuffle_rows", self.shuffle_rows, ">= 1", self.shuffle_rows >= 1),
            ("seed", self.seed, ">= 0", self.seed >= 0),
        )
        for name, value, allowed, ok in checks:
            if not ok:
                raise not_allowed(f"ReadOptions.{name}", value, allowed)


@dataclass(frozen=True)
class _Cursor:
    """The position of the next batch: its epoch, how the epoch's samples are dealt, and its number in that dealing."""

    epoch: int
    dealing: Dealing
    batch: int = 0


class ClickReader(Generic[Made]):
    """An iterable of batches; each ``iter()`` is one epoch. Not thread-safe.

    Like torchdata's stateful loaders, ``state_dict`` between two batches describes the next batch. A reader of the same
    files and options that loads the state continues there; its first ``iter()`` yields the rest of that epoch. When a
    pass is left early and no state is loaded, the next pass starts the epoch again.

    Args:
        source: decodes the files.
        files: the files, as the source planned them; all workers have the same.
        features: the transforms of the samples.
        options: the options by which samples are dealt.
        made: gives what is yielded for a batch.

    Raises:
        InvalidArgument: the files have no samples.
    """

    def __init__(
        self,
        source: Source,
        files: Sequence[PlannedFile],
        features: FittedFeatures,
        options: ReadOptions,
        made: Callable[[Batch], Made],
    ) -> None:
        self._files = tuple(files)
        self._rows = sum(int(file.rows.sum()) for file in files)
        if not self._rows:
            raise no_samples(self._files[0].path if self._files else "ClickReader.files")
        self._parts = PartReader(source, self._files)
        self._features = features
        self._options = options
        self._made = made
        self._next = self._beginning(0)
        self._resume = False
        self._bad_lines = 0
        self._first_bad_line: BadLine | None = None

    def _beginning(self, epoch: int) -> _Cursor:
        options = self._options
        is_in_order = options.in_order and not options.shuffle
        return _Cursor(epoch, Dealing(((0, self._rows),), options.world, options.batch_size, is_in_order))

    @property
    def files(self) -> tuple[PlannedFile, ...]:
        """The files that are read."""
        return self._files

    @property
    def options(self) -> ReadOptions:
        """The options by which samples are dealt."""
        return self._options

    @property
    def features(self) -> FittedFeatures:
        """The transforms in use."""
        return self._features

    def use(self, features: FittedFeatures) -> None:
        """Takes transforms with other statistics of the same inputs, from the next batch on."""
        self._features = features

    @property
    def epoch(self) -> int:
        """The number of epochs completed so far."""
        return self._next.epoch

    @property
    def done(self) -> float:
        """The share of the current pass that was yielded, in [0, 1]."""
        left = sum(end - begin for begin, end in self._next.dealing.left)
        batches = max(1, self._next.dealing.batches)
        return 1 - left / self._rows * (1 - self._next.batch / batches)

    @property
    def bad_lines(self) -> int:
        """The number of malformed samples that this rank has skipped in the current pass, or in the last one."""
        return self._bad_lines

    @property
    def first_bad_line(self) -> BadLine | None:
        """A sample that was skipped in that pass; None: no sample was skipped."""
        return self._first_bad_line

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the next batch and the statistics of the transforms, as plain numbers and lists."""
        cursor, dealing = self._next, self._next.dealing
        return {
            "version": _STATE_VERSION,
            "epoch": cursor.epoch,
            "left": [list(interval) for interval in dealing.left],
            "world": dealing.world,
            "batch_size": dealing.batch_size,
            "rank": self._options.rank,
            "batch": cursor.batch,
            "bad_lines": self._bad_lines,
            "features": self._features.state(),
            "inputs": self._features.spec.described(),
            "targets": dict(self._features.spec.targets),
            "order": self._order_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a state that :meth:`state_dict` returned. On an error nothing changes.

        Raises:
            InvalidArgument: the state is of a reader with other files or another order, of another worker, or with
                another number of workers or batch size; :meth:`load_state_dicts` accepts the last two.
        """
        self._check_order(state)
        for name in ("rank", "world", "batch_size"):
            mine = getattr(self._options, name)
            if state[name] != mine:
                raise InvalidArgument(
                    f"reader state: {name} was {state[name]}; this reader has {mine}, so it needs the states of all "
                    "workers (load_state_dicts)"
                )
        self._set(_Cursor(state["epoch"], self._dealing_of(state), state["batch"]), state["bad_lines"], state)

    def goes_on_from(self, state: dict[str, Any] | None) -> bool:
        """Returns whether this worker's state is enough to go on, as there are as many workers as then.

        Args:
            state: the state of this worker, or of another one where this worker has none; None: there is none.

        Raises:
            InvalidArgument: the state is of a reader with other files or another order. Nothing has changed.
        """
        if state is None:
            return False
        self._check_order(state)
        return all(state[name] == getattr(self._options, name) for name in ("rank", "world", "batch_size"))

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Continues from the states of all workers of a reader, with any number of workers now.

        Each sample that the workers had not yet taken comes once. On an error nothing changes.

        Args:
            states: the states of all workers, of which each was taken at the same time of the job.

        Raises:
            InvalidArgument: a state is of a reader with other files or another order; a worker's state is missing; or
                the workers, which did not wait for each other, were in different epochs.
        """
        self.check_state_dicts(states)
        options, first = self._options, states[0]
        done = {state["rank"]: state["batch"] for state in states}
        then = self._dealing_of(first)
        left = then.left_after([done[rank] for rank in range(then.world)])
        now = replace(then, left=left, world=options.world, batch_size=options.batch_size)
        bad_lines = sum(state["bad_lines"] for state in states) if options.rank == 0 else 0
        self._set(_Cursor(first["epoch"], now), bad_lines, first)

    def check_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Checks, without a change, what :meth:`load_state_dicts` would refuse.

        Raises:
            InvalidArgument: as for :meth:`load_state_dicts`.
        """
        if not states:
            raise not_allowed("reader states", states, "those of all workers")
        for state in states:
            self._check_order(state)
        by_rank: dict[int, dict[str, Any]] = {state["rank"]: state for state in states}
        first = states[0]
        if by_rank.keys() != set(range(first["world"])):
            lacks = min(set(range(first["world"])) - by_rank.keys(), default=first["world"])
            raise InvalidArgument(f"reader state: that of rank {lacks} of {first['world']} workers is missing")
        for name in ("epoch", "left", "world", "batch_size"):
            values = [by_rank[rank][name] for rank in sorted(by_rank)]
            if any(value != values[0] for value in values):
                raise InvalidArgument(
                    f"reader state: {name} differs between the workers ({values[0]!r} and others), so that another "
                    f"number of workers cannot go on; allowed: {first['world']} workers"
                )

    def _dealing_of(self, state: dict[str, Any]) -> Dealing:
        left = tuple((begin, end) for begin, end in state["left"])
        return Dealing(left, state["world"], state["batch_size"], self._next.dealing.in_order)

    def _set(self, cursor: _Cursor, bad_lines: int, state: dict[str, Any]) -> None:
        self._features = FittedFeatures.from_state(self._features.spec, state["features"])
        self._next, self._bad_lines, self._first_bad_line = cursor, bad_lines, None
        self._resume = True

    def _check_order(self, state: dict[str, Any]) -> None:
        if "stream" in state:
            raise InvalidArgument(
                "data.train: the checkpoint is of a job that reads data.stream; begin from it with --from, in another "
                "folder of checkpoints"
            )
        if state.get("version") != _STATE_VERSION:
            raise InvalidArgument(
                f"reader state.version: {state.get('version')!r} is not allowed; allowed: {_STATE_VERSION}. Another "
                "version of sparserow saved it, which deals samples or makes inputs otherwise; let that version end "
                "the epoch"
            )
        mine, saved = self._order_state(), state["order"]
        for name in (*mine, *(name for name in saved if name not in mine)):
            if saved.get(name) != mine.get(name):
                raise InvalidArgument(
                    f"reader state: {name} was {saved.get(name)!r}; this reader has {mine.get(name)!r}, so it would "
                    "deal samples differently"
                )
        check_inputs(self._features.spec, state["inputs"])
        check_targets(self._features.spec, state["targets"])

    def _order_state(self) -> dict[str, Any]:
        options = self._options
        parts = b"".join(file.rows.tobytes() for file in self._files)
        return {
            "files": [file.path for file in self._files],
            "samples": self._rows,
            "parts": xxh3_64_hexdigest(parts),
            "shuffle": options.shuffle,
            "in_order": self._next.dealing.in_order,
            "shuffle_rows": options.shuffle_rows if options.shuffle else 0,
            "seed": options.seed if options.shuffle else 0,
            **({} if options.negatives is None else {"negatives_keep": options.negatives.keep}),
            **({} if options.candidates is None else {"negatives": options.candidates.described()}),
        }

    def __iter__(self) -> Iterator[Made]:
        if not self._resume:
            self._next = self._beginning(self._next.epoch)
            self._bad_lines, self._first_bad_line = 0, None
        self._resume = False
        epoch, dealing, begin = self._next.epoch, self._next.dealing, self._next.batch
        order = self.order(epoch, self._options.shuffle_rows)
        shares = dealing.shares(self._options.rank, begin)
        for number, share in enumerate(shares, start=begin):
            batch = self._batch(order, share)
            self._next = _Cursor(epoch, dealing, number + 1)
            yield batch
        self._next = self._beginning(epoch + 1)

    def order(self, epoch: int, window_rows: int) -> SampleOrder:
        """Returns the order of an epoch, in windows of ``window_rows`` samples."""
        options = self._options
        return SampleOrder(
            self._files, seed=options.seed, epoch=epoch, window_rows=window_rows, shuffle=options.shuffle
        )

    def digest(self, window_rows: int) -> int:
        """Returns a digest of every epoch's order in windows of ``window_rows`` samples, in [1, 2**64).

        It differs as well when the samples become other inputs of the model, or have other labels.
        """
        spec = self._features.spec
        made = [spec.described(), spec.targets]
        text = json.dumps([_STATE_VERSION, self._order_state(), self._options.batch_size, window_rows, *made])
        return xxh3_64_intdigest(text.encode()) or 1

    def batches_of(self, order: SampleOrder, begin: int, end: int) -> Iterator[Made]:
        """Yields the batches of neighbouring positions of an order; the position of the reader does not change.

        The reader's count of malformed samples changes.
        """
        size = self._options.batch_size
        for first in range(begin, end, size):
            yield self._batch(order, [(first, min(first + size, end))])

    def raw_lines(self) -> Iterator[Lines]:
        """Yields all samples of all files, those of every rank, untransformed and in file order, for ``features.fit``.

        The position of the reader does not change, nor does its count of malformed samples.
        """
        for index, file in enumerate(self._files):
            for part in range(len(file.rows)):
                yield self._parts.decoded(index, part).lines

    def made_of(self, lines: Lines) -> Made:
        """Returns the batch of decoded samples, which need not be of the files."""
        return self._made(batch_of(self._features, lines))

    def empty_batch(self) -> Made:
        """Returns a batch without samples."""
        return self._transformed(Samples(self._parts.none(), np.empty(0, np.int64)), 0)

    def _batch(self, order: SampleOrder, share: Sequence[Interval]) -> Made:
        samples: Samples = self._parts.samples(order, share)
        self._bad_lines += samples.bad
        self._first_bad_line = self._first_bad_line or samples.first_bad
        negatives = self._options.negatives
        if negatives is not None:
            kept = np.flatnonzero(negatives.chosen(samples.lines.labels, samples.positions, order.epoch))
            samples = replace(samples, lines=samples.lines.take(kept), positions=samples.positions[kept])
        return self._transformed(samples, order.epoch)

    def _transformed(self, samples: Samples, epoch: int) -> Made:
        batch, candidates = batch_of(self._features, samples.lines), self._options.candidates
        if candidates is not None:
            batch = candidates.with_candidates(batch, samples.positions, epoch)
        return self._made(batch)
