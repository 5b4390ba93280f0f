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


def check_backend(job: JobConfig) -> None:
    """Raises InvalidArgument with the names of all options that ``model.backend`` local has no servers for."""
    if job.model.backend != "local":
        return
    named = list(_of_servers(job))
    if not named:
        return
    hints = [f"--set {each}" for each, name in _EMPTIED.items() if any(one.startswith(name) for one in named)]
    needs, them = ("needs", "it") if len(named) == 1 else ("need", "them")
    way = f" ({', '.join(hints)})" if hints else ""
    raise InvalidArgument(f"{', '.join(named)}: {needs} model.backend ps, as local has no servers; remove {them}{way}")


# Options that a job file on top of which others are set cannot lose otherwise, by what takes them away.
_EMPTIED = {"cluster={}": "cluster.", "train.staleness=0": "train.staleness", "tables={}": "tables"}


def _of_servers(job: JobConfig) -> Iterator[str]:
    train = job.train
    yield from (f"cluster.{name}" for name in sorted(job.cluster.model_fields_set))
    if job.model.min_rows != 1 and not isinstance(job.model, OwnModelConfig):
        yield "model.min_rows"
    for name, is_given in (
        ("staleness", train.staleness != 0),
        ("wire_dtype", "wire_dtype" in train.model_fields_set),
        ("grad_scale", "grad_scale" in train.model_fields_set),
        ("prefetch", train.prefetch > 0),
        ("cache", train.cache is not None),
        ("checkpoint", train.checkpoint is not None),
        ("clip_row_norm", train.clip_row_norm is not None),
        ("dense", train.dense == "ps"),
        ("parallel", train.parts is not None),
    ):
        if is_given:
            yield f"train.{name}"
    if job.tables:
        yield "tables"
    if job.publish.is_asked:
        yield "publish"


def check_effects(job: JobConfig) -> None:
    """Raises InvalidArgument with the name of the first option that would be ignored; returns when there is none."""
    for option, reason in _ignored(job):
        raise InvalidArgument(f"{option}: has no effect {reason}; remove it")


def _ignored(job: JobConfig) -> Iterator[tuple[str, str]]:
    train, elastic = job.train, job.train.elastic
    for name in ("model", "alias", "dtype", "sign"):
        if job.publish.root is None and name in job.publish.model_fields_set:
            yield f"publish.{name}", "without publish.root"
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
