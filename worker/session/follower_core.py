"""The session of a rank that has none with the servers: it counts steps and votes, and gets its rows from its leader.

Its native half has an empty store of its own. It counts the steps, and backward calls within a step, as the leader's
does. No table is bound in it, so a lookup that does not go through the tensor group finds no table and raises.
"""

from __future__ import annotations

from torch import Tensor

from ...cpp_ext import _client
from ...proto.errors import FailedPrecondition
from ...proto.schema import TableSchema
from .no_grad_rows import NO_GRAD_BYTES, no_grad_arguments
from .session_core import SessionCore
from .session_parts import Placement
from .table import KeyedRows
from .tensor_group import TensorGroup

_DEADLINE_MS = 30_000  # no call leaves this process


class FollowerCore(SessionCore):
    """A :class:`SessionCore` without rows.

    Args:
        group: the tensor group, which another rank leads.
        placement: the placement of the group's worker.
        first_step: the step of the leader.
        origins: see :class:`SessionCore`; those of the leader.
    """

    def __init__(self, group: TensorGroup, placement: Placement, *, first_step: int, origins: list[str]) -> None:
        self._store = _client.LocalCluster(shards=1, slot_count=2, memory_budget_bytes=0)
        native = _client.NativeSession(
            self._store.shards,
            first_step=first_step,
            first_sequence=1,
            clocked=placement.staleness is not None,
            grad_sum=True,
            deadline_ms=_DEADLINE_MS,
            **no_grad_arguments(NO_GRAD_BYTES, None, placement.staleness),
        )
        super().__init__(native, _NoCatalog(group), placement)
        self.tensor_group = group
        group.on_backward = native.count_staged
        self.origins[:] = origins

    def table(self, name: str) -> KeyedRows:
        """Raises FailedPrecondition: the leader has the rows."""
        raise _refusal(self.tensor_group, f"table({name!r})")

    def drop_table(self, name: str) -> None:
        """Raises FailedPrecondition: the leader has the rows."""
        raise _refusal(self.tensor_group, f"drop_table({name!r})")

    def create_table(self, schema: TableSchema) -> KeyedRows:
        """Raises FailedPrecondition: the leader has the rows."""
        raise _refusal(self.tensor_group, f"create_table({schema.name!r})")

    def bind(
        self, schema: TableSchema, *, num_rows: int, anchor: Tensor, cached: bool = True, frozen: bool = False
    ) -> str:
        """Notes the table and its learning rate; see :meth:`SessionTables.bind`. The ops do not learn about it."""
        del num_rows, cached
        self._note_bound(schema, anchor, frozen=frozen)
        return schema.full_name

    def _pass_frozen(self, binding: str, frozen: bool) -> None:
        """Does nothing: the ops do not know the table, and the leader freezes its own layer."""

    def send_learning_rates(self) -> None:
        """Does nothing: the leader sends its own, which a schedule sets alike on every rank."""

    def is_lowest_rank(self) -> bool:
        """Returns False: the leader acts for the group."""
        return False


class _NoCatalog:
    """The catalog of a rank that has no session with the servers."""

    def __init__(self, group: TensorGroup) -> None:
        self._group = group

    def create_table(self, schema: TableSchema) -> TableSchema:
        raise _refusal(self._group, f"create_table({schema.name!r})")

    def list_tables(self, namespace: str = "") -> tuple[TableSchema, ...]:
        raise _refusal(self._group, f"list_tables({namespace!r})")

    def drop_table(self, namespace: str, name: str) -> None:
        raise _refusal(self._group, f"drop_table({f'{namespace}/{name}'!r})")

    def close(self) -> None:
        """Does nothing."""


def _refusal(group: TensorGroup | None, what: str) -> FailedPrecondition:
    leader = "" if group is None else f", which is rank {group.leader}"
    return FailedPrecondition(
        f"{what}: this rank has no session with the servers; the leader of its tensor group{leader}, has the rows"
    )
