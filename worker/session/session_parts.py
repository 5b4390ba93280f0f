"""The parts that a session is made of: its placement in the job, and the protocols of the objects that it calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from ...proto.schema import TableSchema
from ...proto.worker_identity import WorkerIdentity
from .participant import NonFinitePolicy
from .row_cache import RowCache
from .table import KeyedRows

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Placement:
    """A worker's rank in its job, and the rules of the job; :func:`connect` describes the values.

    Attributes:
        namespace: the namespace of the tables.
        rank: the rank of this worker.
        world_size: the number of workers that the job began with.
        staleness: how many of the newest steps a pull may miss; None: no clock.
        grad_scale: whether gradients are divided by the number of workers ("mean") or not ("sum").
        on_nonfinite: what ``session.step`` does with NaN or Inf.
        cache: the settings of the row cache; None: no cache.
        deadline_sec: the deadline of a wait for servers or other workers, in seconds.
        quorum: the number of members of a step; None: all workers.
    """

    namespace: str
    rank: int = 0
    world_size: int = 1
    staleness: int | None = 0
    grad_scale: Literal["mean", "sum"] = "mean"
    on_nonfinite: NonFinitePolicy = "raise"
    cache: RowCache | None = None
    deadline_sec: float = 30.0
    quorum: int | None = None


class DenseSide(Protocol):
    """Dense tensors whose gradients go with the session's commits; ``worker/layers/dense_rows.py`` implements it."""

    @property
    def table_name(self) -> str: ...
    @property
    def ids(self) -> Tensor: ...
    @property
    def has_gradients(self) -> bool: ...
    def pull(self, *, train: bool = True) -> None: ...
    def stage(self) -> None: ...
    def end_step(self) -> None: ...
    def write_buffers(self) -> None: ...
    def accept_restored(self, *, has_model: bool) -> None: ...


class Catalog(Protocol):
    """The registry of tables: the coordinator, or a stand-in in this process."""

    def create_table(self, schema: TableSchema) -> TableSchema: ...
    def list_tables(self, namespace: str = "") -> tuple[TableSchema, ...]: ...
    def drop_table(self, namespace: str, name: str) -> None: ...
    def close(self) -> None: ...


class Closeable(Protocol):
    """An object that uses a session in the background, and that the session closes before itself."""

    def close(self) -> None: ...


class NamespaceCore(Protocol):
    """What a session's use of its namespace's own documents needs of :class:`SessionCore`.

    Attributes:
        placement: the worker's place in its job.
        catalog: where tables are registered.
        identity: of the worker; None: it is in no job of a cluster.
        found_tables: the tables that there were before, by name; None: that is not known.
        refits_begun: how often the workers of the job have begun to learn features anew.
    """

    placement: Placement
    catalog: Catalog
    identity: WorkerIdentity | None
    found_tables: Mapping[str, int | None] | None
    refits_begun: int

    @property
    def namespace(self) -> str: ...
    @property
    def is_distributed(self) -> bool: ...
    def create_table(self, schema: TableSchema) -> KeyedRows: ...
    def lower_rank_begins(self) -> bool: ...
