"""The features of a job, as they are published with its model."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ...proto.config.job import JobConfig
from ...proto.features.base import Feature
from ...proto.features.document import files_of
from ...proto.features.kinds import SequenceFeature
from ...proto.options.csv_dialect import CsvDialect
from ..data import FittedFeatures
from ..data.criteo import COLUMNS
from ..data.sources.feature_columns import feature_set
from ..models import FeatureEmbeddings
from .build_model import input_names


def published_features(job: JobConfig, fitted: FittedFeatures, model: nn.Module) -> dict[str, bytes]:
    """Returns the files of a job's features by name.

    A feature for which training draws negatives is published as a list, of the candidates that a caller wants ranked.

    Args:
        job: the job.
        fitted: the inputs with the statistics of the training files.
        model: the model.
    """
    features = feature_set(job.data.features)
    statistics = {**features.statistics, **fitted.statistics}
    drawn = [task.item for task in job.all_tasks if task.negatives is not None]
    served = tuple(_list_of(each) if each.name in drawn else each for each in features.features)
    rows = {
        name: count
        for module in model.modules()
        if isinstance(module, FeatureEmbeddings)
        for name, count in module.rows_by_feature.items()
    }
    whole = replace(features, features=served, statistics=statistics, csv=_dialect_of(job), rows=rows)
    return files_of(whole, input_names(job.model, fitted.spec))


def _dialect_of(job: JobConfig) -> CsvDialect | None:
    """Returns how the training files write their fields, so that files to predict are read alike."""
    if job.data.format == "criteo":
        return CsvDialect(columns=COLUMNS, delimiter="\t")
    csv = job.data.csv
    return None if csv is None else CsvDialect(**{name: getattr(csv, name) for name in CsvDialect.model_fields})


def _list_of(feature: Feature) -> SequenceFeature:
    """Returns the feature of a list of ids, each with the key that a feature of one id has."""
    return SequenceFeature(**feature.model_dump(exclude_unset=True, exclude={"kind"}))
