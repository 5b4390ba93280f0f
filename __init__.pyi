"""The public names of Sparserow, by module; ``__init__.py`` imports each when it is first used."""

from .deploy import ray as ray
from .deploy.launch.local_cluster import LocalCluster as LocalCluster, local_cluster as local_cluster
from .deploy.launch.local_serving import LocalServing as LocalServing, local_serving as local_serving
from .proto.errors import (
    DataLoss as DataLoss,
    DeadlineExceeded as DeadlineExceeded,
    FailedPrecondition as FailedPrecondition,
    Fenced as Fenced,
    Internal as Internal,
    InvalidArgument as InvalidArgument,
    NotFound as NotFound,
    OutsideQuorum as OutsideQuorum,
    PermissionDenied as PermissionDenied,
    ResourceExhausted as ResourceExhausted,
    SparserowError as SparserowError,
    StaleRoute as StaleRoute,
    Unavailable as Unavailable,
)
from .proto.features.base import HashUnknown as HashUnknown
from .proto.features.kinds import (
    BucketizedFeature as BucketizedFeature,
    CrossFeature as CrossFeature,
    IdFeature as IdFeature,
    MultiHotFeature as MultiHotFeature,
    NumericFeature as NumericFeature,
    SequenceFeature as SequenceFeature,
    SplitFeature as SplitFeature,
    TimeFeature as TimeFeature,
)
from .proto.optimizers import (
    FTRL as FTRL,
    LAMB as LAMB,
    SGD as SGD,
    Adadelta as Adadelta,
    Adagrad as Adagrad,
    Adam as Adam,
    AdamW as AdamW,
    Lion as Lion,
    RMSprop as RMSprop,
    RowWiseAdagrad as RowWiseAdagrad,
)
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
from .worker import data as data, metrics as metrics, models as models
from .worker.checkpoint import (
    RestoredCheckpoint as RestoredCheckpoint,
    SavedCheckpoint as SavedCheckpoint,
    keep_rows as keep_rows,
    restore as restore,
    save as save,
)
from .worker.data.feature_tensors import Features as Features
from .worker.layers.compile_model import compile_model as compile_model
from .worker.layers.deferred import deferred as deferred
from .worker.layers.dense_rows import DenseRows as DenseRows, dense_on_servers as dense_on_servers
from .worker.layers.distribute import distribute as distribute
from .worker.layers.embedding import copy_sharing_rows as copy_sharing_rows
from .worker.layers.fuse_lookups import merge_lookups as merge_lookups
from .worker.layers.gather_tables import gather_tables as gather_tables
from .worker.layers.lift import lift_embeddings as lift_embeddings
from .worker.metrics import losses as losses
from .worker.prefetch import prefetch as prefetch
from .worker.publish.dense_publishing import DensePublisher as DensePublisher
from .worker.publish.publishing import Published as Published, publish as publish
from .worker.row_files import (
    export_table as export_table,
    import_table as import_table,
    import_weights as import_weights,
)
from .worker.session.connect import connect as connect
from .worker.session.in_process import InProcessCluster as InProcessCluster
from .worker.session.otel_trace import record_otel as record_otel
from .worker.session.row_cache import RowCache as RowCache
from .worker.session.session import Session as Session
from .worker.session.session_metrics import SessionMetrics as SessionMetrics
from .worker.session.session_stats import SessionStats as SessionStats
from .worker.session.step import NonFiniteGradient as NonFiniteGradient
from .worker.session.table import TableRows as TableRows

__version__: str
