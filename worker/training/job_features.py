"""The features of a job, as they are published with its model."""

from __future__ import annotations

from dataclasses import replace

from ...proto.config.job import JobConfig
from ...proto.features.compute import Statistics
from ...proto.features.document import files_of
from ..data import Features
from ..data.sources.feature_columns import feature_set
from .build_model import input_names


def published_features(job: JobConfig, fitted: Features) -> dict[str, bytes]:
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
    statistics: dict[str, Statistics] = dict(features.statistics)
    for feature, first, width in zip(spec.dense, fitted.mean, fitted.std, strict=True):
        if feature.needs_fit:
            statistics[feature.name] = (float(first), float(first + width if feature.min_max else width))
    for bucket, edges in zip(spec.buckets, fitted.edges, strict=True):
        statistics[bucket.name] = tuple(edges.tolist())
    whole, names = replace(features, statistics=statistics), input_names(job.model, spec)
    if names is not None:
        return files_of(whole, names)
    return files_of(whole, (tuple(feature.name for feature in spec.dense), spec.sparse_names))
