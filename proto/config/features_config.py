"""The section ``features`` of a job file, and what it asks of the other sections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import InvalidArgument
from ..features.base import Feature
from ..features.kinds import ListOfKeys, MultiHotFeature, SequenceFeature, feature_of
from .model_config import OwnModelConfig

if TYPE_CHECKING:
    from .job import JobConfig


def features_of_job(job: JobConfig) -> tuple[Feature, ...]:
    """Returns the features of a job; () without the section.

    Raises:
        InvalidArgument: a feature is not allowed, or the sections ``data`` and ``features`` do not fit together.
    """
    columns, form = job.data.samples, job.data.format
    if not job.features:
        if not columns.has_inputs:
            raise InvalidArgument(
                f"{columns.section}: no input columns; name some under numeric, categorical or buckets, or a section "
                "features"
            )
        _check_list_delimiter(job, ())
        return ()
    if columns.has_inputs and form != "criteo":
        raise InvalidArgument(
            f"features: takes the place of {columns.section}.numeric, categorical and buckets; remove them"
        )
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
        if form == "criteo" and _reads_lists(feature):
            raise InvalidArgument(
                f"features.{feature.name}: reads lists, which data.format criteo does not have; allowed: kind id, "
                "dense, bucketize, cross, split, time"
            )
    columns.check_features(made)
    _check_list_delimiter(job, made)
    return made


def _reads_lists(feature: Feature) -> bool:
    return isinstance(feature, MultiHotFeature | SequenceFeature)


def _check_list_delimiter(job: JobConfig, features: tuple[Feature, ...]) -> None:
    csv = job.data.csv
    if csv is None or any(_reads_lists(feature) for feature in features):
        return
    if "list_delimiter" in csv.model_fields_set:
        raise InvalidArgument(
            "data.csv.list_delimiter: has no effect without a feature of kind multi_hot or sequence; remove it"
        )
