"""Batches for a model whose ``forward`` takes the features by name, cut into the micro-batches of a step.

The tensors of each micro-batch are in the batch as they reach the model, so a prefetch finds the ids of its lookups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .batch import Batch, Lists, TimeRange, part_of, time_range_of


@dataclass(frozen=True)
class NamedPart:
    """The samples of one micro-batch.

    Attributes:
        tensors: the features by name: (B) float32 of numbers, (B) int64 of keys, and the tensors of lists.
        labels: the labels, (B) float32; where the job names several, (B, labels).
        label_names: the names of several labels; () for one.
        weights: the weights of the samples, (B) float32; None: each counts once.
        groups: a key of the group of each sample, (B) int64; None: the job names none.
        times: the time of each sample, microseconds since 1970 in UTC, (B) int64 on the host; None: the job names none.
    """

    tensors: Mapping[str, Tensor | Lists]
    labels: Tensor
    label_names: tuple[str, ...] = ()
    weights: Tensor | None = None
    groups: Tensor | None = None
    times: Tensor | None = None

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def label(self, name: str) -> Tensor:
        """Returns a label of the samples, (B) float32; see :meth:`Batch.label`."""
        return self.labels[:, self.label_names.index(name)] if self.label_names else self.labels


@dataclass(frozen=True)
class NamedBatch:
    """The samples of one step on one worker.

    Attributes:
        micro_batches: the micro-batches, at least one.
    """

    micro_batches: tuple[NamedPart, ...]

    @staticmethod
    def of(batch: Batch, names: Sequence[str], size: int, *, least: int = 1) -> NamedBatch:
        """Returns the samples of a batch of matrices.

        Args:
            batch: the batch.
            names: the names of the features that the model takes.
            size: the number of samples of a micro-batch.
            least: the least number of micro-batches; empty ones are added.
        """
        return NamedBatch(tuple(_named(part, names) for part in batch.parts(size, least=least)))

    def __len__(self) -> int:
        return sum(len(part) for part in self.micro_batches)

    @property
    def device(self) -> torch.device:
        """The device of the labels."""
        return self.micro_batches[0].labels.device

    @property
    def time_range(self) -> TimeRange | None:
        """The times of the first and the last sample by time; None for an empty batch, and without times."""
        return time_range_of(part.times for part in self.micro_batches)

    def to(self, device: torch.device) -> NamedBatch:
        """Returns the batch on ``device``; tensors that are there already are not copied."""
        return NamedBatch(tuple(_moved(part, device) for part in self.micro_batches))

    def example(self, samples: int) -> NamedPart | None:
        """Returns the first samples of a micro-batch; None where they are too few, or a list feature has too few keys.

        Args:
            samples: the number of samples; they and the keys of each list feature are 2 at least.
        """
        for part in self.micro_batches:
            first = replace(
                part,
                tensors={name: _first(value, samples) for name, value in part.tensors.items()},
                labels=part.labels[:samples],
            )
            lists = [value for value in first.tensors.values() if isinstance(value, tuple)]
            if len(first) >= _LEAST and all(len(values) >= _LEAST for values, *_ in lists):
                return first
        return None


_LEAST = 2  # torch.export takes sizes of 0 and 1 for constants


def _first(value: Tensor | Lists, samples: int) -> Tensor | Lists:
    return part_of(value, 0, samples) if isinstance(value, tuple) else value[:samples]


def _named(part: Batch, names: Sequence[str]) -> NamedPart:
    # A column of its own is contiguous, and does not keep the matrix.
    matrices = replace(part, dense=part.dense.t().contiguous().t(), sparse=part.sparse.t().contiguous().t())
    tensors = matrices.tensors
    return NamedPart(
        {name: tensors[name] for name in names}, part.labels, part.names.labels, part.weights, part.groups, part.times
    )


def _moved(part: NamedPart, device: torch.device) -> NamedPart:
    return replace(
        part,
        tensors={
            name: tuple(each.to(device) for each in value) if isinstance(value, tuple) else value.to(device)
            for name, value in part.tensors.items()
        },
        labels=part.labels.to(device),
        weights=None if part.weights is None else part.weights.to(device),
        groups=None if part.groups is None else part.groups.to(device),
    )
