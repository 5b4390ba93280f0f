"""Candidates of samples: the item of a sample, and others that are drawn as its negatives.

A draw is a pure function of (seed, epoch, position of the sample in the epoch's order), whatever the number of workers,
the size of batches, and the point where a run goes on. Draws of ``in_batch`` depend on the samples of the batch too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from xxhash import xxh3_64

from ...proto.errors import InvalidArgument
from ...proto.features.jagged import Jagged, offsets_of
from .batch import Batch
from .negatives import uniform

_TRAIN_STREAM, _TEST_STREAM = 1, 2  # numbers that distinguish random streams of one seed and epoch
_PENDING = 1 << 22  # keys that wait to be counted together

Keys: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ItemTable:
    """Items to draw from, each with a weight. 16 bytes an item.

    Attributes:
        keys: the keys of the items, (n) int64, ascending.
        ends: the sum of the weights up to each item, this one included, (n) int64.
    """

    keys: Keys
    ends: Keys

    @staticmethod
    def of(keys: Keys, weights: Keys | None = None) -> ItemTable:
        """Returns the table of items.

        Args:
            keys: the keys, (n) int64, ascending, each once.
            weights: the weight of each, (n) int64, at least 1; None: 1.
        """
        return ItemTable(keys, np.arange(1, len(keys) + 1) if weights is None else np.cumsum(weights))

    def draw(self, own: Keys, numbers: npt.NDArray[np.float64]) -> Jagged:
        """Returns candidates: each sample's own item, and others in proportion to their weights, with replacement.

        A sample's own item is not drawn. Where there is no other item, a sample has its own alone.

        Args:
            own: the key of each sample's item, (n) int64; it may be absent from the table.
            numbers: a number in [0, 1) for each draw, (n, draws).
        """
        total = int(self.ends[-1]) if len(self.ends) else 0
        places = np.minimum(np.searchsorted(self.keys, own), max(len(self.keys) - 1, 0))
        if not total:
            return Jagged(own, np.arange(len(own) + 1))
        is_there = self.keys[places] == own
        begins = np.where(places > 0, self.ends[places - 1], 0)
        weights = np.where(is_there, self.ends[places] - begins, 0)
        left = total - weights
        drawn = (numbers * left[:, None]).astype(np.int64)
        drawn += np.where(drawn >= begins[:, None], weights[:, None], 0)  # which leaves out the sample's own item
        negatives = self.keys[self._places(drawn.ravel())].reshape(drawn.shape)
        values = np.concatenate([own[:, None], negatives], axis=1)
        lengths = np.where(left > 0, values.shape[1], 1)
        return Jagged(values[np.arange(values.shape[1]) < lengths[:, None]], offsets_of(lengths))

    def _places(self, drawn: Keys) -> Keys:
        """Returns the item of each drawn number; one beyond the last, of a sample without others, has the last item."""
        if int(self.ends[-1]) == len(self.keys):
            return np.minimum(drawn, len(self.keys) - 1)  # every weight is 1
        order = np.argsort(drawn)  # a search for ascending numbers stays in the processor's caches
        places = np.empty_like(order)
        places[order] = np.searchsorted(self.ends, drawn[order], side="right")
        return np.minimum(places, len(self.keys) - 1)

    @cached_property
    def digest(self) -> str:
        """A digest of the items and their weights."""
        made = xxh3_64(np.ascontiguousarray(self.keys).data)
        made.update(np.ascontiguousarray(self.ends).data)
        return str(made.hexdigest())


class ItemCounter:
    """Counts how often each key is there, in memory that grows with the different keys."""

    def __init__(self) -> None:
        self._keys, self._counts = np.empty(0, np.int64), np.empty(0, np.int64)
        self._pending: list[Keys] = []
        self._waiting = 0

    def add(self, keys: Keys) -> None:
        """Counts keys, (n) int64."""
        self._pending.append(keys.copy())
        self._waiting += len(keys)
        if self._waiting >= _PENDING:
            self._count()

    def _count(self) -> None:
        keys, counts = np.unique(np.concatenate([np.empty(0, np.int64), *self._pending]), return_counts=True)
        self._pending, self._waiting = [], 0
        self._keys, places = np.unique(np.concatenate([self._keys, keys]), return_inverse=True)
        self._counts = np.bincount(places, np.concatenate([self._counts, counts])).astype(np.int64)

    def table(self, *, weighted: bool) -> ItemTable:
        """Returns the keys so far.

        Args:
            weighted: whether the weight of a key is its count; False: it is 1.
        """
        self._count()
        return ItemTable.of(self._keys, self._counts if weighted else None)


@dataclass(frozen=True)
class CandidateSampler:
    """Draws the candidates of batches.

    Attributes:
        item: the name of the feature with the key of a sample's item, a column of ``Batch.sparse``.
        kind: "uniform" and "popularity" draw from ``items``; "in_batch" from the other samples of the batch.
        per_positive: the number of negatives of a sample.
        seed: the seed of the draws.
        items: the items with their weights; None for "in_batch".
        is_test: whether the draws are those of an evaluation: the same in every epoch, and others than for training.
    """

    item: str
    kind: Literal["uniform", "popularity", "in_batch"]
    per_positive: int
    seed: int
    items: ItemTable | None = None
    is_test: bool = False

    def for_test(self) -> CandidateSampler:
        """Returns the sampler of evaluations."""
        return replace(self, is_test=True)

    def with_candidates(self, batch: Batch, positions: Keys, epoch: int) -> Batch:
        """Returns a batch whose item is a list of candidates by the same name, the sample's own item first.

        Args:
            batch: the samples.
            positions: the position of each in the order of the epoch, (B) int64.
            epoch: the number of the epoch.
        """
        own = batch.tensors[self.item]
        assert isinstance(own, Tensor)
        drawn = self.draw(own.numpy(), positions, epoch)
        lists = tuple(torch.from_numpy(part) for part in drawn.parts)
        names = replace(batch.names, lists=(*batch.names.lists, self.item))
        return replace(batch, lists=(*batch.lists, lists), names=names)

    def draw(self, own: Keys, positions: Keys, epoch: int) -> Jagged:
        """Returns the candidates of samples: each sample's own item, and ``per_positive`` others.

        Args:
            own: the key of each sample's item, (n) int64.
            positions: the position of each sample in the order of the epoch, (n) int64.
            epoch: the number of the epoch.
        """
        items = self.items
        if items is None:
            keys, counts = np.unique(own, return_counts=True)
            items = ItemTable.of(keys, counts)
        draws = positions[:, None] * self.per_positive + np.arange(self.per_positive)
        stream = (self.seed, 0, _TEST_STREAM) if self.is_test else (self.seed, epoch, _TRAIN_STREAM)
        return items.draw(own, uniform(draws, stream))

    def described(self) -> str:
        """Returns what the draws depend on beside the samples, as text; a position of a reader keeps it."""
        items = "" if self.items is None else f" of {len(self.items.keys)} items {self.items.digest}"
        return f"{self.per_positive} {self.kind} for {self.item}, seed {self.seed}{items}"


def count_items(parts: Iterable[Keys], item: str, *, weighted: bool) -> ItemTable:
    """Returns the items of the training files.

    Args:
        parts: the keys of the items of all samples.
        item: the name of their feature.
        weighted: whether the weight of an item is the number of its samples; False: it is 1.

    Raises:
        InvalidArgument: there are fewer than two different items.
    """
    counter = ItemCounter()
    for keys in parts:
        counter.add(keys)
    table = counter.table(weighted=weighted)
    if len(table.keys) < 2:
        raise InvalidArgument(
            f"tasks.*.negatives: feature {item!r} has {len(table.keys)} different keys in the training files; allowed: "
            "2 or more"
        )
    return table
