"""Decides what a restore loads into which table, from the tables of a checkpoint and of the cluster, without I/O."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from ....proto import control_pb2 as pb
from ....proto.checkpoint import manifest as files
from ....proto.checkpoint.accepted import changes, check_named, is_accepted
from ....proto.errors import FailedPrecondition, InvalidArgument, NotFound, SparserowError, not_allowed
from ....proto.schema import TableSchema
from ....proto.schema_message import message_of_schema
from ..state.registry import Registry

_WHAT_FOLLOWS = {
    "dim": "the new columns are initial and the optimizer's state begins anew",
    "dtype": "weights are rounded to it",
    "optimizer": "its state begins anew",
}


@dataclass(frozen=True)
class RestorePlan:
    """The tables that each shard loads.

    Attributes:
        tables: the tables of the checkpoint, and the tables of the namespace that the restore empties.
        made: the ids of tables that the cluster did not have.
    """

    tables: list[pb.LoadTable]
    made: list[int]

    @property
    def table_ids(self) -> set[int]:
        """The ids of the tables that the restore empties and fills."""
        return {table.schema.id for table in self.tables}


def plan_restore(
    manifest: files.Manifest, request: pb.RestoreRequest, registry: Registry, namespace: str
) -> RestorePlan:
    """Returns the plan of a restore; tables that the cluster lacked are in the registry afterwards.

    Args:
        manifest: the manifest of the checkpoint.
        request: says which tables are restored, and under which names.
        registry: the tables of the cluster; it is unchanged when this raises.
        namespace: the namespace that is restored; empty: all.

    Raises:
        NotFound: the checkpoint lacks a table, or has none of the namespace.
        InvalidArgument: two tables would become one, a name is not allowed, or a table is of another namespace.
        FailedPrecondition: the rows do not fit a table of the cluster.
    """
    made: list[int] = []
    try:
        return RestorePlan(_planned(manifest, request, registry, namespace, made), made)
    except SparserowError:
        forget_tables(registry, made)
        raise


def forget_tables(registry: Registry, made: list[int]) -> None:
    """Removes the tables that a plan has added to the registry."""
    for table_id in made:
        registry.remove(table_id)


def _planned(
    manifest: files.Manifest, request: pb.RestoreRequest, registry: Registry, namespace: str, made: list[int]
) -> list[pb.LoadTable]:
    saved = {table.schema.full_name: table for table in manifest.tables}
    renames = {rename.saved: rename.name for rename in request.renames}
    for name in (*renames, *request.tables):
        if not _is_in(namespace, renames.get(name, name)):
            raise not_allowed("restore: table", renames.get(name, name), f"tables of the namespace {namespace!r}")
    wanted = set(request.tables) or {name for name in saved if _is_in(namespace, renames.get(name, name))}
    if not wanted and saved and registry.tables(namespace):
        raise NotFound(
            f"restore: {manifest.name} has no table of namespace {namespace!r}; there are: {', '.join(sorted(saved))}; "
            "renames gives a table another name"
        )
    for name in (*renames, *sorted(wanted)):
        if name not in saved:
            known = ", ".join(sorted(saved)) or "none"
            raise NotFound(f"restore: table {name!r} is not in {manifest.name}; there are: {known}")
    planned: dict[int, pb.LoadTable] = {}
    for name in sorted(wanted | renames.keys()):
        entry = saved[name]
        schema, changed = _target(registry, entry.schema, renames.get(name, name), request.accept, made)
        if schema.id in planned:
            raise InvalidArgument(f"restore: two tables would become {schema.full_name}; rename one of them")
        planned[schema.id] = pb.LoadTable(
            schema=message_of_schema(schema),
            saved_table_id=entry.schema.id,
            changed=changed,
        )
    check_named(request.accept, [f"{load.schema.namespace}/{load.schema.name}" for load in planned.values()])
    if request.namespace and not request.tables:
        for schema in registry.tables(request.namespace):
            empty = pb.LoadTable(schema=message_of_schema(schema), saved_table_id=schema.id, without_rows=True)
            planned.setdefault(schema.id, empty)
    return list(planned.values())


def _is_in(namespace: str, name: str) -> bool:
    return not namespace or name.partition("/")[0] == namespace


def _target(
    registry: Registry, saved: TableSchema, name: str, accept: Collection[str], made: list[int]
) -> tuple[TableSchema, list[str]]:
    """Returns the schema that a saved table is loaded into, and what it has otherwise."""
    namespace, slash, short = name.partition("/")
    if not slash:
        raise not_allowed("restore: table", name, "NAMESPACE/NAME")
    present = registry.get(namespace, short)
    if present is None:
        schema, _ = registry.admit(replace(saved, namespace=namespace, name=short))
        made.append(schema.id)
        return schema, []
    differing = changes(present, saved)
    for key, now, then in differing:
        words = (
            f"restore: table {present.full_name} has {key} {now if key == 'optimizer' else repr(now)}, the checkpoint "
        )
        words += f"has {then if key == 'optimizer' else repr(then)}"
        if key == "dim" and now < then:
            raise FailedPrecondition(f"{words}; columns are not dropped; leave the table out, or give it another name")
        if not is_accepted(accept, present.full_name, key):
            raise FailedPrecondition(f"{words}; {_WHAT_FOLLOWS[key]} where {present.full_name}.{key} is in accept")
    return present, [key for key, *_ in differing]
