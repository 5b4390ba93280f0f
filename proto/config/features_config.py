"""The section ``features`` of a job file, and what it asks of the other sections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import InvalidArgument
from ..features.kinds import Feature, ListOfKeys, feature_of
from .model_config import OwnModelConfig

if TYPE_CHECKING:
    from .job import JobConfig


def features_of_job(job: JobConfig) -> tuple[Feature, ...]:
    """Returns the features of a job; () without the section.

    Raises:
        InvalidArgument: a feature is not allowed, or the sections ``data`` and ``features`` do not fit together.
    """
    columns = job.data.columns
    if not job.features:
        if columns is not None and not columns.has_inputs:
            raise InvalidArgument(
                "data.columns: no input columns; name some under numeric, categorical or buckets, or a section features"
            )
        return ()
    if columns is None:
        raise InvalidArgument(
            f"features: is not possible with data.format {job.data.format}; allowed: parquet, orc, arrow, jsonl"
        )
    if columns.has_inputs:
        raise InvalidArgument("features: takes the place of data.columns.numeric, categorical and buckets; remove them")
    made = tuple(feature_of(name, options) for name, options in job.features.items())
    is_own = isinstance(job.model, OwnModelConfig)
    for feature in made:
        if isinstance(feature, ListOfKeys) and not is_own:
            raise InvalidArgument(
                f"features.{feature.name}: gives lists, which model.kind {job.model.kind} does not read; allowed: kind "
                "id, dense, bucketize, cross, time, or a model.class that reads lists"
            )
        if getattr(feature, "table", None) is not None and not is_own:
            raise InvalidArgument(
                f"features.{feature.name}.table: is not possible, as each feature of model.kind {job.model.kind} has a "
                "table of its own"
            )
        for setting, column in columns.roles.items():
            if column in feature.columns and setting != "data.columns.group":
                raise InvalidArgument(f"features.{feature.name}: reads {column!r}, which is {setting}")
    return made
