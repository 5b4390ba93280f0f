"""Builds the model of a job, and checks that its data has the columns that the model needs."""

from __future__ import annotations

from torch import nn

from ...proto.config.data_config import DataConfig
from ...proto.config.job import DlrmConfig, ModelConfig
from ...proto.errors import InvalidArgument
from ..data import FeatureSpec
from ..data.sources import check_files, feature_spec
from ..models import DLRM, DeepFM


def check_data(data: DataConfig, model: ModelConfig) -> None:
    """Checks, before anything is started for a job, that the files exist and have the columns that the model needs.

    Raises:
        NotFound, InvalidArgument, DataLoss: see :func:`~sparserow.worker.data.sources.check_files` and
            :func:`table_rows`.
    """
    check_files(data, "test")
    table_rows(model, feature_spec(data))


def table_rows(config: ModelConfig, features: FeatureSpec) -> dict[str, int]:
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
    """Builds a DLRM or DeepFM in plain torch, with initial weights from torch's generator.

    Args:
        config: the kind and the widths of the model.
        features: the inputs that the model reads.
        sparse: whether the tables produce sparse gradients.

    Raises:
        InvalidArgument: there is no sparse column, or ``model.table_rows`` names a column that does not exist.
    """
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
