"""The public names of Sparserow, by module; ``__init__.py`` imports each when it is first used."""

from .deploy import ray as ray
from .deploy.launch.local_cluster import LocalCluster as LocalCluster, local_cluster as local_cluster
from .deploy.launch.local_serving import LocalServing as LocalServing, local_serving as local_serving
from .proto import errors as errors, optim as optim
from .proto.row_keys import hash_key as hash_key
from .proto.schema import (
    Constant as Constant,
    Normal as Normal,
    RowPolicy as RowPolicy,
    Table as Table,
    TableSchema as TableSchema,
    Uniform as Uniform,
    XavierNormal as XavierNormal,
    XavierUniform as XavierUniform,
)
from .proto.security.security import Security as Security, use_security as use_security
from .serving.client.client import (
    AsyncServingClient as AsyncServingClient,
    LookupRows as LookupRows,
    ServingClient as ServingClient,
)
from .serving.inference.inference import Prediction as Prediction, ServedModel as ServedModel
from .serving.inference.load_program import load_program as load_program
from .serving.inference.lookup_cache import LookupCache as LookupCache
from .serving.inference.served_model_stats import (
    ServedModelMetrics as ServedModelMetrics,
    ServedModelStats as ServedModelStats,
)
from .worker import metrics as metrics, models as models
from .worker.api import data as data, features as features
from .worker.api.connect import connect as connect
from .worker.api.in_process import InProcessCluster as InProcessCluster
from .worker.api.session import Session as Session, TableRows as TableRows
from .worker.checkpoint import RestoredCheckpoint as RestoredCheckpoint, SavedCheckpoint as SavedCheckpoint
from .worker.layers.compile_model import compile_model as compile_model
from .worker.layers.deferred import deferred as deferred
from .worker.layers.dense_rows import DenseRows as DenseRows
from .worker.layers.embedding import copy_sharing_rows as copy_sharing_rows
from .worker.layers.fuse_lookups import merge_lookups as merge_lookups
from .worker.metrics import losses as losses
from .worker.publish.dense_publishing import DensePublisher as DensePublisher
from .worker.publish.publishing import Published as Published
from .worker.session.row_cache import RowCache as RowCache
from .worker.session.session_metrics import SessionMetrics as SessionMetrics
from .worker.session.session_stats import SessionStats as SessionStats
from .worker.session.step import NonFiniteGradient as NonFiniteGradient

__version__: str
