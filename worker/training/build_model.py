"""Builds the model of a job, and checks that its data has the columns that the model needs."""

from __future__ import annotations

from torch import nn

from ...proto.config.job import JobConfig
from ...proto.config.model_config import DeepFmConfig, DlrmConfig, ModelConfig, OwnModelConfig
from ...proto.errors import InvalidArgument, not_allowed
from ..data import FeatureSpec
from ..data.sources import check_files, feature_spec
from ..models import DLRM, DeepFM
from . import own_model


def check_data(job: JobConfig) -> None:
    """Checks, before anything is started for a job, that the files exist and have what the model needs.

    Raises:
        NotFound, InvalidArgument, DataLoss: see :func:`~sparserow.worker.data.sources.check_files`,
            :func:`table_rows` and :func:`input_names`.
    """
    check_files(job.data, "test")
    spec, model = feature_spec(job.data), job.model
    if isinstance(model, OwnModelConfig):
        kind = own_model.class_of(model)
        own_model.check_arguments(model, kind)
        own_model.with_pools(model, kind, dict(spec.pools))
        input_names(model, spec)
        for task in job.all_tasks:
            if task.item is not None and task.item not in spec.sparse_names:
                raise not_allowed(
                    f"tasks.{task.name}.item", task.item, f"a feature of keys: {', '.join(spec.sparse_names)}"
                )
    else:
        table_rows(model, spec)


def input_names(config: ModelConfig, features: FeatureSpec) -> tuple[str, ...] | None:
    """Returns the names of the features that the model's forward takes; None where it takes matrices.

    Raises:
        InvalidArgument: see :func:`~sparserow.worker.training.own_model.inputs_of`.
    """
    if not isinstance(config, OwnModelConfig):
        return None
    names = features.names
    return own_model.inputs_of(config, (*names.dense, *names.sparse, *names.lists))


def table_rows(config: DlrmConfig | DeepFmConfig, features: FeatureSpec) -> dict[str, int]:
    """Returns the number of rows of each column's table, in the order of ``Batch.sparse``.

    It is that of ``model.table_rows``; else the number of keys that the column's feature can give; else ``model.rows``.

    Raises:
        InvalidArgument: ``model.table_rows`` names a column that does not exist.
    """
    names = features.sparse_names
    for name in config.table_rows:
        if name not in names:
            raise InvalidArgument(f"model.table_rows: no sparse column {name!r}; allowed: {', '.join(names)}")
    counts = dict(features.key_counts)
    return {name: config.table_rows.get(name, counts.get(name, config.rows)) for name in names}


def build_model(config: ModelConfig, features: FeatureSpec, *, sparse: bool) -> nn.Module:
    """Builds the model of a job in plain torch, with initial weights from torch's generator.

    Args:
        config: the section ``model`` of the job.
        features: the inputs that the model reads.
        sparse: whether the tables produce sparse gradients.

    Raises:
        InvalidArgument: there is no sparse column, or ``model.table_rows`` names a column that does not exist; or see
            :func:`~sparserow.worker.training.own_model.make`.
    """
    if isinstance(config, OwnModelConfig):
        model = own_model.make(config, dict(features.pools))
        own_model.tie_tables(config, model)
        return model
    rows = table_rows(config, features)
    if not rows:
        raise InvalidArgument("data: the model needs a sparse column; name one under categorical or buckets")
    n_dense = len(features.dense)
    if isinstance(config, DlrmConfig):
        return DLRM(
            n_dense,
            rows,
            dim=config.dim,
            bottom=config.bottom,
            top=config.top,
            dropout=config.dropout,
            init_scale=config.init_scale,
            sparse=sparse,
        )
    return DeepFM(
        n_dense,
        rows,
        dim=config.dim,
        hidden=config.hidden,
        dropout=config.dropout,
        init_scale=config.init_scale,
        sparse=sparse,
    )
