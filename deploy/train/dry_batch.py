"""Reads the first samples of a job's training data, to try the job on them before anything is started."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...proto.config.job import JobConfig
from ...worker.data import Batch, FeatureSpec
from ...worker.data.candidates import ItemCounter, ItemTable
from ...worker.data.features import fit
from ...worker.data.lines_to_batch import batch_of
from ...worker.data.sources import feature_spec, first_samples
from ...worker.training.candidate_items import candidate_sampler

if TYPE_CHECKING:
    from ...worker.data.decoded import Lines


@dataclass(frozen=True)
class FirstSamples:
    """The first samples of the training data.

    Attributes:
        spec: the features of the data.
        batch: the first batch, with the candidates of a task that draws negatives.
    """

    spec: FeatureSpec
    batch: Batch


def read_first_samples(job: JobConfig) -> FirstSamples:
    """Reads the first batch of a job; statistics and items are those of the samples that were read.

    Raises:
        NotFound, InvalidArgument, DataLoss, FailedPrecondition: a file cannot be read, or lacks a column.
        BadLine: the beginning of the data is malformed.
    """
    spec = feature_spec(job.data)
    lines = first_samples(job.data, "train")
    first = lines.take(slice(0, job.train.batch_size))
    batch = batch_of(fit(spec, [lines]), first)
    candidates = candidate_sampler(job, lambda item, weighted: _items_of(lines, spec, item, weighted=weighted))
    if candidates is not None:
        batch = candidates.with_candidates(batch, np.arange(len(batch)), 0)
    return FirstSamples(spec, batch)


def _items_of(lines: Lines, spec: FeatureSpec, item: str, *, weighted: bool) -> ItemTable:
    """Returns the items of some samples, which stand for those of all training files."""
    counter = ItemCounter()
    counter.add(lines.keys[:, spec.categorical.index(item)])
    return counter.table(weighted=weighted)
