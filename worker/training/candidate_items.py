"""The sampler of a job's negatives, and the items that it draws from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...proto.config.job import JobConfig
from ..data.candidates import CandidateSampler, ItemTable
from ..data.sources.feature_columns import feature_set


def candidate_sampler(job: JobConfig, items: Callable[[str, bool], ItemTable]) -> CandidateSampler | None:
    """Returns what draws the candidates of a job's task with negatives; None: no task has them.

    Args:
        job: the job.
        items: gives the items of the training data by the name of a feature, weighted by their samples or not.
    """
    task = next((task for task in job.all_tasks if task.negatives is not None), None)
    if task is None or task.negatives is None or task.item is None:
        return None
    kind, per_positive = task.negatives.kind, task.negatives.per_positive
    table = None
    if kind != "in_batch":
        listed = _lines_of(job, task.item) if kind == "uniform" else None
        table = items(task.item, kind == "popularity") if listed is None else listed
    return CandidateSampler(task.item, kind, per_positive, job.train.seed, table)


def _lines_of(job: JobConfig, item: str) -> ItemTable | None:
    """Returns the keys of the lines of a feature's vocabulary; None: it has none."""
    if not job.data.features:
        return None
    features = feature_set(job.data.features)
    keys = features.keys_of(item) if item in features.vocabularies else None
    return None if keys is None else ItemTable.of(np.arange(keys - len(features.vocabularies[item]), keys))
