"""What a session is given: its place among the workers, and what it asks of those that it works with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from ...proto.schema import TableSchema
from .row_cache import RowCache
from .transaction import NonFinitePolicy


@dataclass(frozen=True)
class Placement:
    """A worker among the workers of its job, and the job's rules."""

    namespace: str
    rank: int = 0
    world_size: int = 1
    staleness: int | None = 0
    grad_scale: Literal["mean", "sum"] = "mean"
    on_nonfinite: NonFinitePolicy = "raise"
    cache: RowCache | None = None


class DenseSide(Protocol):
    """Dense tensors whose gradients go with the session's commits: ``worker/layers/dense_rows.py``."""

    @property
    def table_name(self) -> str: ...
    def pull(self, *, train: bool = True) -> None: ...
    def stage(self) -> None: ...
    def end_step(self) -> None: ...


class Catalog(Protocol):
    """Where tables are registered: the coordinator, or an in-process stand-in."""

    def create_table(self, schema: TableSchema) -> TableSchema: ...
    def list_tables(self, namespace: str = "") -> tuple[TableSchema, ...]: ...
    def drop_table(self, namespace: str, name: str) -> None: ...
    def close(self) -> None: ...


class Closeable(Protocol):
    """What uses a session in the background."""

    def close(self) -> None: ...
