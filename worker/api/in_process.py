"""A cluster in this process: stores without a coordinator and without servers, for one worker.

It serves tests, training in one process, and ``sparserow bench train`` as the reference without RPC.
"""

from __future__ import annotations

from dataclasses import replace

from ...cpp_ext import _client
from ...proto.errors import FailedPrecondition, NotFound
from ...proto.native import schema_parameters
from ...proto.schema import TableSchema
from ..session.no_grad_rows import NO_GRAD_BYTES, no_grad_arguments
from ..session.participant import NonFinitePolicy
from ..session.row_cache import RowCache, cache_arguments, check_cache
from ..session.session_core import SessionCore
from ..session.session_parts import Placement
from .session import Session


class InProcessCluster:
    """The shards and the table catalog of a cluster that lives in this process.

    Args:
        shards: the number of stores over which the slots are spread.
        slot_count: the number of slots; a power of two.
        memory_budget_bytes: the memory budget of each store, in bytes; 0: no budget.
    """

    def __init__(self, *, shards: int = 1, slot_count: int = 16384, memory_budget_bytes: int = 0) -> None:
        self._native = _client.LocalCluster(
            shards=shards, slot_count=slot_count, memory_budget_bytes=memory_budget_bytes
        )
        self._schemas: dict[str, TableSchema] = {}

    def connect(
        self,
        namespace: str = "default",
        *,
        staleness: int | None = 0,
        on_nonfinite: NonFinitePolicy = "raise",
        cache: RowCache | None = None,
        no_grad_bytes: int = NO_GRAD_BYTES,
        no_grad_sec: float | None = None,
    ) -> Session:
        """Returns a session over these shards; the arguments are those of :func:`connect`.

        Its worker is the only one, so no pull waits for another worker, whatever ``staleness`` is. Unless
        ``staleness`` is 0, commits are finished in the background.

        Raises:
            InvalidArgument: an argument is out of its range.
        """
        check_cache(cache, staleness)
        native = _client.NativeSession(
            self._native.shards,
            first_step=0,
            first_sequence=1,
            clocked=staleness is not None,
            grad_sum=False,
            deadline_ms=30_000,
            **cache_arguments(cache),
            **no_grad_arguments(no_grad_bytes, no_grad_sec, staleness),
        )
        placement = Placement(namespace=namespace, staleness=staleness, on_nonfinite=on_nonfinite, cache=cache)
        found = {schema.name: self.row_count(namespace, schema.name) for schema in self.list_tables(namespace)}
        return Session(SessionCore(native, self, placement, found_tables=found))

    def create_table(self, schema: TableSchema) -> TableSchema:
        """Creates a table on every store, or finds the table that exists with this schema.

        Args:
            schema: the table's schema; its ``id`` is not used.

        Returns:
            The schema with the table's id.

        Raises:
            FailedPrecondition: the table exists with another schema.
        """
        known = self._schemas.get(schema.full_name)
        if known is not None:
            if replace(known, id=0) != replace(schema, id=0):
                raise FailedPrecondition(f"table {schema.full_name!r} exists with another schema: {known}")
            return known
        made = replace(schema, id=_client.id_of_name(schema.full_name))
        self._native.create_table(**schema_parameters(made))
        self._schemas[made.full_name] = made
        return made

    def list_tables(self, namespace: str = "") -> tuple[TableSchema, ...]:
        """Returns the schemas of a namespace's tables, sorted by name; an empty namespace means all namespaces."""
        found = [schema for schema in self._schemas.values() if namespace in ("", schema.namespace)]
        return tuple(sorted(found, key=lambda schema: schema.full_name))

    def drop_table(self, namespace: str, name: str) -> None:
        """Removes a table and its rows.

        Raises:
            NotFound: there is no such table.
        """
        schema = self._schemas.pop(f"{namespace}/{name}", None)
        if schema is None:
            raise NotFound(f"table {namespace}/{name} does not exist")
        self._native.drop_table(schema.id)

    def row_count(self, namespace: str, name: str) -> int:
        """Returns the number of rows that exist in a table."""
        return self._native.rows(self._schemas[f"{namespace}/{name}"].id)

    def close(self) -> None:
        """Does nothing: the stores are released together with this object."""
