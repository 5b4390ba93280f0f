"""Sparserow: a parameter server for sparse recommendation models, native to PyTorch.

Names are imported when they are first used, so ``import sparserow`` is cheap and a server never loads torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .deploy.launch.local_cluster import LocalCluster, local_cluster
    from .deploy.launch.local_serving import LocalServing, local_serving
    from .proto.errors import (
        DataLoss,
        DeadlineExceeded,
        FailedPrecondition,
        Fenced,
        Internal,
        InvalidArgument,
        NotFound,
        ResourceExhausted,
        SparserowError,
        StaleRoute,
        Unavailable,
    )
    from .proto.schema import (
        SGD,
        Adagrad,
        Adam,
        Constant,
        Normal,
        RowPolicy,
        RowWiseAdagrad,
        Table,
        TableSchema,
        Uniform,
        XavierNormal,
        XavierUniform,
    )
    from .proto.security.security import Security, use_security
    from .serving.client.client import AsyncServingClient, LookupRows, ServingClient
    from .serving.inference.inference import LookupCache, Prediction, ServedModel
    from .serving.inference.load_program import load_program
    from .worker.cache.settings import RowCache
    from .worker.checkpoint import RestoredCheckpoint, SavedCheckpoint, keep_rows, restore, save
    from .worker.layers.deferred import deferred
    from .worker.layers.dense_rows import DenseRows, dense_on_servers
    from .worker.layers.distribute import distribute
    from .worker.layers.fuse_lookups import merge_lookups
    from .worker.layers.lift import lift_embeddings
    from .worker.prefetch import prefetch
    from .worker.publish.dense_publishing import DensePublisher
    from .worker.publish.publishing import Published, publish
    from .worker.row_files import export_table, import_table, import_weights
    from .worker.session.connect import connect
    from .worker.session.in_process import InProcessCluster
    from .worker.session.keys import hash_key
    from .worker.session.otel_trace import record_otel
    from .worker.session.session import Session
    from .worker.session.session_metrics import SessionMetrics
    from .worker.session.session_stats import SessionStats
    from .worker.session.table import TableRows
    from .worker.session.transaction import NonFiniteGradient

__version__ = "0.1.0"

_HOMES = {
    "worker.publish.dense_publishing": ("DensePublisher",),
    "serving.inference.inference": ("LookupCache", "Prediction", "ServedModel"),
    "serving.inference.load_program": ("load_program",),
    "deploy.launch.local_cluster": ("LocalCluster", "local_cluster"),
    "deploy.launch.local_serving": ("LocalServing", "local_serving"),
    "worker.publish.publishing": ("Published", "publish"),
    "proto.errors": (
        "DataLoss",
        "DeadlineExceeded",
        "FailedPrecondition",
        "Fenced",
        "Internal",
        "InvalidArgument",
        "NotFound",
        "ResourceExhausted",
        "SparserowError",
        "StaleRoute",
        "Unavailable",
    ),
    "proto.schema": (
        "SGD",
        "Adagrad",
        "Adam",
        "Constant",
        "Normal",
        "RowPolicy",
        "RowWiseAdagrad",
        "Table",
        "TableSchema",
        "Uniform",
        "XavierNormal",
        "XavierUniform",
    ),
    "proto.security.security": ("Security", "use_security"),
    "serving.client.client": ("AsyncServingClient", "LookupRows", "ServingClient"),
    "worker.cache.settings": ("RowCache",),
    "worker.checkpoint": ("RestoredCheckpoint", "SavedCheckpoint", "keep_rows", "restore", "save"),
    "worker.session.connect": ("connect",),
    "worker.layers.deferred": ("deferred",),
    "worker.layers.dense_rows": ("DenseRows", "dense_on_servers"),
    "worker.layers.distribute": ("distribute",),
    "worker.session.in_process": ("InProcessCluster",),
    "worker.session.keys": ("hash_key",),
    "worker.layers.lift": ("lift_embeddings",),
    "worker.layers.fuse_lookups": ("merge_lookups",),
    "worker.prefetch": ("prefetch",),
    "worker.row_files": ("export_table", "import_table", "import_weights"),
    "worker.session.session": ("Session",),
    "worker.session.session_stats": ("SessionStats",),
    "worker.session.otel_trace": ("record_otel",),
    "worker.session.session_metrics": ("SessionMetrics",),
    "worker.session.table": ("TableRows",),
    "worker.session.transaction": ("NonFiniteGradient",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022 - grouped as above
    "DataLoss",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Fenced",
    "Internal",
    "InvalidArgument",
    "NotFound",
    "ResourceExhausted",
    "SparserowError",
    "StaleRoute",
    "Unavailable",
    "SGD",
    "Adagrad",
    "Adam",
    "Constant",
    "Normal",
    "RowPolicy",
    "RowWiseAdagrad",
    "Table",
    "TableSchema",
    "Uniform",
    "XavierNormal",
    "XavierUniform",
    "DensePublisher",
    "LookupCache",
    "Prediction",
    "Security",
    "use_security",
    "ServedModel",
    "load_program",
    "LocalCluster",
    "local_cluster",
    "LocalServing",
    "local_serving",
    "Published",
    "publish",
    "AsyncServingClient",
    "LookupRows",
    "ServingClient",
    "RowCache",
    "RestoredCheckpoint",
    "SavedCheckpoint",
    "keep_rows",
    "restore",
    "save",
    "connect",
    "deferred",
    "DenseRows",
    "dense_on_servers",
    "distribute",
    "InProcessCluster",
    "hash_key",
    "lift_embeddings",
    "merge_lookups",
    "prefetch",
    "export_table",
    "import_table",
    "import_weights",
    "Session",
    "SessionStats",
    "SessionMetrics",
    "record_otel",
    "TableRows",
    "NonFiniteGradient",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
