"""The section ``features`` of a job file, and what it asks of the other sections."""

from __future__ import annotations

from ..errors import InvalidArgument
from ..features.base import Feature
from ..features.kinds import MultiHotFeature, SequenceFeature, feature_of
from .job_sections import JobSections


def features_of_job(job: JobSections) -> tuple[Feature, ...]:
    """Returns the features of a job's section; () without it, which stands for all columns of Criteo's layout.

    Raises:
        InvalidArgument: a feature is not allowed, or the sections ``data`` and ``features`` do not fit together.
    """
    columns, form = job.data.samples, job.data.format
    if not job.features:
        if form != "criteo":
            raise InvalidArgument(f"features: are needed with data.format {form}; allowed: a mapping of sections")
        return ()
    made = tuple(feature_of(name, options) for name, options in job.features.items())
    for feature in made:
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


def _check_list_delimiter(job: JobSections, features: tuple[Feature, ...]) -> None:
    csv = job.data.csv
    if csv is None or any(_reads_lists(feature) for feature in features):
        return
    if "list_delimiter" in csv.model_fields_set:
        raise InvalidArgument(
            "data.csv.list_delimiter: has no effect without a feature of kind multi_hot or sequence; remove it"
        )
