"""The model of a job."""

from __future__ import annotations

from torch import nn

from ...proto.config.job import DataConfig, DlrmConfig, ModelConfig
from ...proto.errors import InvalidArgument
from ..data import FeatureSpec, feature_spec, find_files
from ..models import DLRM, DeepFM


def check_data(data: DataConfig, model: ModelConfig) -> None:
    """Whether the files are there and have the columns that the model wants, before anything is started for a job.

    Raises:
        NotFound, InvalidArgument, DataLoss: as :func:`~sparserow.worker.data.find_files` and :func:`table_rows`.
    """
    find_files(data, "test")
    table_rows(model, feature_spec(data))


def table_rows(config: ModelConfig, features: FeatureSpec) -> dict[str, int]:
    """Rows of each column's table, in the order of ``Batch.sparse``.

    Raises:
        InvalidArgument: ``model.table_rows`` names a column that is not there.
    """
    names = features.sparse_names
    for name in config.table_rows:
        if name not in names:
            raise InvalidArgument(f"model.table_rows: no sparse column {name!r}; allowed: {', '.join(names)}")
    return {name: config.table_rows.get(name, config.rows) for name in names}


def build_model(config: ModelConfig, features: FeatureSpec, *, sparse: bool) -> nn.Module:
    """A DLRM or DeepFM in plain torch, with the initial weights of torch's generator.

    Args:
        config: kind and widths.
        features: the inputs it reads.
        sparse: whether its tables make sparse gradients.

    Raises:
        InvalidArgument: as :func:`table_rows`; no sparse column at all.
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
