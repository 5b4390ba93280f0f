"""The features of a job, as they are published with its model."""

from __future__ import annotations

from dataclasses import replace

from ...proto.config.job import JobConfig
from ...proto.features.document import files_of
from ..data import FittedFeatures
from ..data.sources.feature_columns import feature_set
from .build_model import input_names


def published_features(job: JobConfig, fitted: FittedFeatures) -> dict[str, bytes]:
    """Returns the files of a job's features by name; {} for a job without features.

    The arguments of a model by kind are a matrix of the numbers and a matrix of the keys, in the order of
    :class:`Batch`; those of a class of one's own are the features that its forward takes.

    Args:
        job: the job.
        fitted: the inputs with the statistics of the training files.
    """
    if not job.data.features:
        return {}
    features = feature_set(job.data.features)
    spec = fitted.spec
    statistics = {**features.statistics, **fitted.statistics}
    whole, names = replace(features, statistics=statistics), input_names(job.model, spec)
    if names is not None:
        return files_of(whole, names)
    return files_of(whole, (tuple(feature.name for feature in spec.dense), spec.sparse_names))
