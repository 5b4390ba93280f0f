"""The features of a job, as they are published with its model."""

from __future__ import annotations

from dataclasses import replace

from ...proto.config.data_config import DataConfig
from ...proto.features.compute import Statistics
from ...proto.features.document import files_of
from ..data import Features
from ..data.sources.feature_columns import feature_set


def published_features(data: DataConfig, fitted: Features) -> dict[str, bytes]:
    """Returns the files of a job's features by name; {} for a job without features.

    The model's arguments are a matrix of the numbers and a matrix of the keys, in the order of :class:`Batch`.

    Args:
        data: the section ``data`` of the job.
        fitted: the inputs with the statistics of the training files.
    """
    if not data.features:
        return {}
    features = feature_set(data.features)
    spec = fitted.spec
    statistics: dict[str, Statistics] = dict(features.statistics)
    for feature, first, width in zip(spec.dense, fitted.mean, fitted.std, strict=True):
        if feature.needs_fit:
            statistics[feature.name] = (float(first), float(first + width if feature.min_max else width))
    for bucket, edges in zip(spec.buckets, fitted.edges, strict=True):
        statistics[bucket.name] = tuple(edges.tolist())
    numbers = tuple(feature.name for feature in spec.dense)
    return files_of(replace(features, statistics=statistics), (numbers, spec.sparse_names))
