"""Builds the model of a job, and checks that its data has the features that the model needs."""

from __future__ import annotations

from torch import nn

from ...proto.config.job import JobConfig
from ...proto.config.model_config import ModelConfig
from ...proto.errors import SparserowError, not_allowed
from ..data import FeatureSpec
from ..data.sources import check_files, feature_spec
from ..layers.deferred import deferred
from . import model_class
from .job_tables import JobTables
from .own_loss import OwnLoss
from .split_towers import check_towers


def check_data(job: JobConfig) -> None:
    """Checks, before anything is started for a job, that the files exist and have what the model needs.

    The model is built once for it, without its tables.

    Raises:
        NotFound, InvalidArgument, DataLoss: see :func:`~sparserow.worker.data.sources.check_files`,
            :func:`input_names`, :func:`build_model`, :func:`~sparserow.worker.training.split_towers.check_towers`,
            :class:`~sparserow.worker.training.job_tables.JobTables` and
            :class:`~sparserow.worker.training.own_loss.OwnLoss`.
    """
    check_files(job.data, "test")
    spec, config = feature_spec(job.data), job.model
    model_class.arguments_of(config, model_class.class_of(config), spec)
    input_names(config, spec)
    for task in job.all_tasks:
        names = spec.sparse_names if task.negatives is None else spec.categorical
        if task.item is not None and task.item not in names:
            raise not_allowed(f"tasks.{task.name}.item", task.item, f"a feature of keys: {', '.join(names)}")
    for task in job.all_tasks:
        if task.has_own_loss:
            OwnLoss(task).check()
    model = model_without_tables(config, spec)
    if job.train.parallel is not None:
        check_towers(model, job.train.parallel.tensor)
    if config.backend == "ps":
        JobTables(job, model)


def input_names(config: ModelConfig, features: FeatureSpec) -> tuple[str, ...]:
    """Returns the names of the features that the model's forward takes, in its order.

    Raises:
        InvalidArgument: see :func:`~sparserow.worker.training.model_class.inputs_of`.
    """
    names = features.names
    return model_class.inputs_of(config, (*names.dense, *names.sparse, *names.lists))


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
            return build_model(config, features)
    except SparserowError:
        if not is_local:
            raise
    return build_model(config, features)  # the workers allocate every layer as well


def build_model(config: ModelConfig, features: FeatureSpec) -> nn.Module:
    """Builds the model of a job in plain torch, with initial weights from torch's generator.

    Args:
        config: the section ``model`` of the job.
        features: the inputs that the model reads.

    Raises:
        InvalidArgument: see :func:`~sparserow.worker.training.model_class.make`.
    """
    model = model_class.make(config, features)
    model_class.check_reads(config, model, input_names(config, features))
    model_class.tie_tables(config, model)
    return model
