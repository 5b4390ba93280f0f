"""Refuses options of a job that would have no effect beside the job's other options, each by its name.

A new option of this kind needs a line here and a line in the table of deploy/reference/option_effects.py.
A test goes through that table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..errors import InvalidArgument
from .model_config import OwnModelConfig

if TYPE_CHECKING:
    from .job import JobConfig


def check_effects(job: JobConfig) -> None:
    """Raises InvalidArgument with the name of the first option that would be ignored; returns when there is none."""
    for option, reason in _ignored(job):
        raise InvalidArgument(f"{option}: has no effect {reason}; remove it")


def _ignored(job: JobConfig) -> Iterator[tuple[str, str]]:
    train, elastic = job.train, job.train.elastic
    if job.model.backend == "local":
        for name in sorted(job.cluster.model_fields_set):
            yield f"cluster.{name}", "with model.backend local, which has no cluster (--set cluster={} empties it)"
        if train.staleness != 0:
            yield "train.staleness", "with model.backend local, whose rows are never stale (--set train.staleness=0)"
        for name in ("wire_dtype", "grad_scale"):
            if name in train.model_fields_set:
                yield f"train.{name}", "with model.backend local, which has no servers"
        if job.model.min_rows != 1 and not isinstance(job.model, OwnModelConfig):
            yield "model.min_rows", "with model.backend local, where every table is in the worker"
    if train.namespace_policy is not None and job.cluster.address is None:
        yield "train.namespace_policy", "without cluster.address, as a cluster of the job's own has no tables"
    if "features_policy" in train.model_fields_set and job.cluster.address is None:
        yield "train.features_policy", "without cluster.address, as a cluster of the job's own keeps no features"
    sections = {"train.row_optimizer": train.row_optimizer}
    sections.update({f"tables.{name}.optimizer": each.optimizer for name, each in job.tables.items() if each.optimizer})
    for section, rows in sections.items():
        if "decoupled" in rows.model_fields_set and rows.weight_decay == 0:
            yield f"{section}.decoupled", f"without {section}.weight_decay"
    if elastic is not None:
        if elastic.url is None and "save_every" in elastic.model_fields_set:
            yield "train.elastic.save_every", "without train.elastic.url, where rows are saved"
        if job.data.shuffle_rows != 0 and "shuffle_rows" in job.data.model_fields_set:
            yield "data.shuffle_rows", "with train.elastic, which shuffles lease_rows lines together; allowed: 0"
