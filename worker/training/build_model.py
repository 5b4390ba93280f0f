"""Builds the model of a job, and checks that its data has the columns that the model needs."""

from __future__ import annotations

from torch import nn

from ...proto.config.job import JobConfig
from ...proto.config.model_config import DeepFmConfig, DlrmConfig, ModelConfig, OwnModelConfig
from ...proto.errors import InvalidArgument, SparserowError, not_allowed
from ..data import FeatureSpec
from ..data.sources import check_files, feature_spec
from ..layers.deferred import deferred
from ..models import DLRM, DeepFM
from . import own_model
from .job_tables import JobTables


def check_data(job: JobConfig) -> None:
    """Checks, before anything is started for a job, that the files exist and have what the model needs.

    A model of one's own is built once for it, without its tables.

    Raises:
        NotFound, InvalidArgument, DataLoss: see :func:`~sparserow.worker.data.sources.check_files`,
            :func:`table_rows`, :func:`input_names`, :func:`build_model` and
            :class:`~sparserow.worker.training.job_tables.JobTables`.
    """
    check_files(job.data, "test")
    spec, model = feature_spec(job.data), job.model
    if isinstance(model, OwnModelConfig):
        kind = own_model.class_of(model)
        own_model.check_arguments(model, kind)
        own_model.with_pools(model, kind, dict(spec.pools))
        input_names(model, spec)
        for task in job.all_tasks:
            names = spec.sparse_names if task.negatives is None else spec.categorical
            if task.item is not None and task.item not in names:
                raise not_allowed(f"tasks.{task.name}.item", task.item, f"a feature of keys: {', '.join(names)}")
        made = model_without_tables(model, spec)
        if model.backend == "ps":
            JobTables(job, made)
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


def model_without_tables(config: ModelConfig, features: FeatureSpec) -> nn.Module:
    """Builds the model of a job to look at it, without allocating its tables.

    Layers that stay in the workers are allocated, as the class may initialise them as it likes.

    Args:
        config: the section ``model`` of the job.
        features: the inputs that the model reads.

    Raises:
        InvalidArgument: see :func:`build_model`.
    """
    is_local = config.backend == "local"
    try:
        with deferred(min_rows=1 if is_local else config.min_rows):
            return build_model(config, features, sparse=False)
    except SparserowError:
        if not is_local:
            raise
    return build_model(config, features, sparse=False)  # the workers allocate every layer as well


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
        own_model.check_reads(config, model, input_names(config, features) or ())
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
