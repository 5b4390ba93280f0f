"""What a restore loads into which table: the tables of a checkpoint against those of the cluster. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ....proto import control_pb2 as pb
from ....proto.checkpoint import manifest as files
from ....proto.errors import FailedPrecondition, InvalidArgument, NotFound, SparserowError
from ....proto.schema import SGD, TableSchema
from ....proto.schema_message import message_of_schema
from ..state.registry import Registry, first_difference


@dataclass(frozen=True)
class RestorePlan:
    """What each shard loads.

    Attributes:
        tables: of the checkpoint, and those of the namespace that are empty afterwards.
        made: ids of tables that the cluster did not have.
    """

    tables: list[pb.LoadTable]
    made: list[int]

    @property
    def table_ids(self) -> set[int]:
        """Ids of the tables that are emptied and filled."""
        return {table.schema.id for table in self.tables}


def plan_restore(manifest: files.Manifest, request: pb.RestoreRequest, registry: Registry) -> RestorePlan:
    """The tables of the checkpoint, and the empty ones of the namespace; new ones are in the registry afterwards.

    Args:
        manifest: of the checkpoint.
        request: which tables, under which names.
        registry: of the cluster; it is as it was when this raises.

    Raises:
        NotFound: the checkpoint lacks a table.
        InvalidArgument: two tables would become one, or a name is none.
        FailedPrecondition: the rows do not fit a table of the cluster.
    """
    made: list[int] = []
    try:
        return RestorePlan(_planned(manifest, request, registry, made), made)
    except SparserowError:
        forget_tables(registry, made)
        raise


def forget_tables(registry: Registry, made: list[int]) -> None:
    """Takes back what a plan has made."""
    for table_id in made:
        registry.remove(table_id)


def _planned(
    manifest: files.Manifest, request: pb.RestoreRequest, registry: Registry, made: list[int]
) -> list[pb.LoadTable]:
    saved = {table.schema.full_name: table for table in manifest.tables}
    renames = {rename.saved: rename.name for rename in request.renames}
    wanted = set(request.tables) or set(saved)
    for name in (*renames, *sorted(wanted)):
        if name not in saved:
            known = ", ".join(sorted(saved)) or "none"
            raise NotFound(f"restore: table {name!r} is not in {manifest.name}; there are: {known}")
    planned: dict[int, pb.LoadTable] = {}
    for name in sorted(wanted | renames.keys()):
        entry = saved[name]
        schema, without_state = _target(registry, entry.schema, renames.get(name, name), request.reset_optimizer, made)
        if schema.id in planned:
            raise InvalidArgument(f"restore: two tables would become {schema.full_name}; rename one of them")
        planned[schema.id] = pb.LoadTable(
            schema=message_of_schema(schema),
            saved_table_id=entry.schema.id,
            without_state=without_state,
        )
    if request.namespace and not request.tables:
        for schema in registry.tables(request.namespace):
            empty = pb.LoadTable(schema=message_of_schema(schema), saved_table_id=schema.id, without_rows=True)
            planned.setdefault(schema.id, empty)
    return list(planned.values())


def _target(
    registry: Registry, saved: TableSchema, name: str, reset_optimizer: bool, made: list[int]
) -> tuple[TableSchema, bool]:
    """The schema that a saved table is loaded into, and whether its optimizer's state begins anew."""
    namespace, slash, short = name.partition("/")
    if not slash:
        raise InvalidArgument(f"restore: table {name!r} is not allowed; allowed: NAMESPACE/NAME")
    present = registry.get(namespace, short)
    if present is None:
        schema, _ = registry.admit(replace(saved, namespace=namespace, name=short))
        made.append(schema.id)
        return schema, False
    difference = first_difference(present, saved)
    if difference is None:
        return present, False
    field_name, now, then = difference
    if field_name in ("dim", "dtype"):
        raise FailedPrecondition(
            f"restore: table {present.full_name} has {field_name} {now!r}, the checkpoint {then!r}; rows cannot be "
            "carried over; leave the table out, or give it another name"
        )
    if _state_of(present) != _state_of(saved) and not reset_optimizer:
        raise FailedPrecondition(
            f"restore: table {present.full_name} has optimizer {_state_of(present)}, the checkpoint "
            f"{_state_of(saved)}; its state begins anew only when asked (reset_optimizer)"
        )
    return present, _state_of(present) != _state_of(saved)


def rows_differ(present: TableSchema, saved: TableSchema) -> bool:
    """Whether rows of one schema cannot be rows of the other."""
    return (present.dim, present.dtype, _state_of(present)) != (saved.dim, saved.dtype, _state_of(saved))


def _state_of(schema: TableSchema) -> str:
    """What decides the form of the optimizer's state."""
    optimizer = schema.optimizer
    has_momentum = isinstance(optimizer, SGD) and optimizer.momentum != 0
    return type(optimizer).__name__ + (" with momentum" if has_momentum else "")
