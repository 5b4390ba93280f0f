"""The batches that a reader yields: the samples of a step as tensors, by name or as matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

# Keys of lists: values (m) int64 and offsets (B + 1) int64, and weights (m) float32 where the feature has some.
Lists: TypeAlias = tuple[Tensor, ...]
TimeRange: TypeAlias = tuple[int, int]  # microseconds since 1970 in UTC


@dataclass(frozen=True)
class BatchNames:
    """The names of what a batch holds.

    Attributes:
        dense: the names of the columns of ``Batch.dense``.
        sparse: the names of the columns of ``Batch.sparse``.
        lists: the names of ``Batch.lists``.
        labels: the names of the columns of ``Batch.labels`` where there are several; () for one label.
    """

    dense: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Batch:
    """The samples of one step on one worker. B may be 0, as every rank yields the same number of batches.

    Attributes:
        dense: the transformed numeric features, (B, n_dense) float32.
        sparse: the keys, one of 63 bits for each column, (B, n_sparse) int64.
        labels: the labels, (B) float32; where the job names several, (B, labels).
        lists: the features that give lists of keys.
        weights: the weights of the samples, (B) float32; None: each counts once.
        groups: a key of the group of each sample, for metrics by group, (B) int64; None: the job names none.
        names: the names of the features and labels.
        times: the time of each sample, microseconds since 1970 in UTC, (B) int64 on the host; None: the job names none.
    """

    dense: Tensor
    sparse: Tensor
    labels: Tensor
    lists: tuple[Lists, ...] = ()
    weights: Tensor | None = None
    groups: Tensor | None = None
    names: BatchNames = BatchNames()
    times: Tensor | None = None

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    @property
    def device(self) -> torch.device:
        """The device of the numbers and labels; keys may have stayed on the host."""
        return self.dense.device

    @property
    def time_range(self) -> TimeRange | None:
        """The times of the first and the last sample by time; None for an empty batch, and without times."""
        return time_range_of([self.times])

    @property
    def tensors(self) -> dict[str, Tensor | Lists]:
        """The features by name: (B) float32 of numbers, (B) int64 of keys, and the tensors of lists."""
        named: dict[str, Tensor | Lists] = dict(zip(self.names.dense, self.dense.unbind(1), strict=True))
        named.update(zip(self.names.sparse, self.sparse.unbind(1), strict=True))
        named.update(zip(self.names.lists, self.lists, strict=True))
        return named

    def label(self, name: str) -> Tensor:
        """Returns a label of the samples, (B) float32.

        Args:
            name: the name of the label; any name where the batch has one alone.
        """
        return self.labels[:, self.names.labels.index(name)] if self.names.labels else self.labels

    def part(self, begin: int, end: int) -> Batch:
        """Returns the samples at [begin, end), as views."""
        rows = slice(begin, end)
        return replace(
            self,
            dense=self.dense[rows],
            sparse=self.sparse[rows],
            labels=self.labels[rows],
            lists=tuple(part_of(lists, begin, end) for lists in self.lists),
            weights=None if self.weights is None else self.weights[rows],
            groups=None if self.groups is None else self.groups[rows],
            times=None if self.times is None else self.times[rows],
        )

    def parts(self, size: int, *, least: int = 1) -> Iterator[Batch]:
        """Yields the parts of the batch, of ``size`` samples each, and empty parts until there are ``least``."""
        if len(self) <= size and least == 1:
            yield self
            return
        for begin in range(0, max(len(self), least * size), size):
            yield self.part(begin, begin + size)

    def to(self, device: torch.device) -> Batch:
        """Returns the batch on ``device``; tensors that are there already are not copied."""
        return self._mapped(lambda tensor: tensor.to(device))

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return replace(
            self,
            dense=change(self.dense),
            sparse=change(self.sparse),
            labels=change(self.labels),
            lists=tuple(tuple(change(tensor) for tensor in lists) for lists in self.lists),
            weights=None if self.weights is None else change(self.weights),
            groups=None if self.groups is None else change(self.groups),
        )


def time_range_of(times: Iterable[Tensor | None]) -> TimeRange | None:
    """Returns the least and the greatest of times, in microseconds; None where there are none."""
    ranges = [(int(each.min()), int(each.max())) for each in times if each is not None and len(each)]
    return (min(first for first, _ in ranges), max(last for _, last in ranges)) if ranges else None


def part_of(lists: Lists, begin: int, end: int) -> Lists:
    """Returns the lists of the samples at [begin, end); values and weights are views."""
    values, offsets, *weights = lists
    mine = offsets[min(begin, len(offsets) - 1) : end + 1]
    first, last = int(mine[0]), int(mine[-1])
    return (values[first:last], mine - first, *(each[first:last] for each in weights))
