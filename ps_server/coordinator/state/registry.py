"""The namespaces and tables of one cluster: names, ids and schemas. The module does no I/O and is not thread-safe."""

from __future__ import annotations

import base64
import dataclasses
import difflib
import struct
from typing import Any

from ....proto.errors import FailedPrecondition, NotFound
from ....proto.names import check_name, id_of_name
from ....proto.schema import TableSchema
from ....proto.schema_message import message_of_schema


class Registry:
    """The namespaces and tables of one cluster.

    Ids are hashes of names. A table id always belongs to the same name, and so does a namespace id.
    """

    def __init__(self) -> None:
        self._namespaces: dict[int, str] = {}
        self._tables: dict[int, TableSchema] = {}
        self._table_ids: dict[str, set[int]] = {}  # by namespace, of those with tables
        self._saved_forms: dict[int, str] = {}  # of tables; the state is saved several times for each registration

    def namespace_id(self, namespace: str) -> int:
        """Returns the id of a namespace, which is created on first use.

        Raises:
            InvalidArgument: the name is not allowed.
            FailedPrecondition: the id belongs to another namespace.
        """
        check_name("namespace", namespace)
        number = id_of_name(namespace)
        holder = self._namespaces.setdefault(number, namespace)
        if holder != namespace:
            raise FailedPrecondition(
                f"namespace {namespace!r} hashes to the id of another one ({number}); choose another name"
            )
        return number

    def admit(self, schema: TableSchema) -> tuple[TableSchema, bool]:
        """Records a table.

        The initial learning rate is not part of a schema: the first one stays on record.

        Returns:
            The schema with its id and version, and whether the table is new.

        Raises:
            FailedPrecondition: the table exists with another schema (the text names the field and both values), or its
                id belongs to another table. Nothing is changed.
        """
        number = id_of_name(schema.full_name)
        existing = self._tables.get(number)
        if existing is None:
            self.namespace_id(schema.namespace)
            self._tables[number] = dataclasses.replace(schema, id=number, version=1)
            self._table_ids.setdefault(schema.namespace, set()).add(number)
            return self._tables[number], True
        if existing.full_name != schema.full_name:
            raise FailedPrecondition(
                f"table {schema.full_name} hashes to the id of another table ({number}); choose another name"
            )
        difference = first_difference(existing, schema)
        if difference is not None:
            field, old, new = difference
            raise FailedPrecondition(
                f"table {schema.full_name} exists with {field} {old!r}, the request says {new!r}; "
                "ask for the same schema, choose another name or drop the table "
                f"(sparserow table drop {schema.full_name})"
            )
        return existing, False

    def get(self, namespace: str, name: str) -> TableSchema | None:
        """Returns the schema of a table; None when there is none."""
        full_name = f"{namespace}/{name}"
        schema = self._tables.get(id_of_name(full_name))
        return schema if schema is not None and schema.full_name == full_name else None

    def find(self, namespace: str, name: str) -> TableSchema:
        """Returns the schema of a table.

        Raises:
            NotFound: there is no such table; the text suggests the closest name.
        """
        schema = self.get(namespace, name)
        if schema is not None:
            return schema
        full_name = f"{namespace}/{name}"
        near = difflib.get_close_matches(full_name, [table.full_name for table in self._tables.values()], n=1)
        raise NotFound(f"there is no table {full_name}" + (f"; did you mean {near[0]}?" if near else ""))

    def remove(self, table_id: int) -> None:
        """Forgets a table; the call is harmless when the table is gone."""
        schema = self._tables.pop(table_id, None)
        if schema is None:
            return
        self._saved_forms.pop(table_id, None)
        ids = self._table_ids[schema.namespace]
        ids.discard(table_id)
        if not ids:
            del self._table_ids[schema.namespace]

    def remove_namespace(self, namespace: str) -> None:
        """Forgets a namespace that has no tables any more; the call is harmless when the namespace is gone.

        A job that continues in it keeps its numbers, because the id of a namespace is a hash of its name.
        """
        self._namespaces.pop(id_of_name(namespace), None)

    def tables(self, namespace: str = "") -> list[TableSchema]:
        """Returns the tables of a namespace, ordered by name; an empty namespace stands for all."""
        ids = self._table_ids.get(namespace, ()) if namespace else self._tables
        return sorted((self._tables[table_id] for table_id in ids), key=lambda table: table.full_name)

    def table_count(self, namespace: str) -> int:
        """Returns the number of tables of a namespace."""
        return len(self._table_ids.get(namespace, ()))

    def saved_forms(self) -> list[str]:
        """Returns each table's schema as the state of the coordinator has it: a message in base64."""
        for table_id in self._tables.keys() - self._saved_forms.keys():
            message = message_of_schema(self._tables[table_id])
            self._saved_forms[table_id] = base64.b64encode(message.SerializeToString()).decode()
        return list(self._saved_forms.values())

    def namespaces(self) -> list[str]:
        """Returns the names of all namespaces, in order."""
        return sorted(self._namespaces.values())


def first_difference(existing: TableSchema, requested: TableSchema) -> tuple[str, Any, Any] | None:
    """Returns the first field in which two schemas of one table differ, with both values; None when they are equal.

    Hyper-parameters are compared as float32, which is what shards store; the learning rate is not compared.
    """
    for field in ("dim", "dtype", "seed", "init", "optimizer", "policy"):
        old, new = getattr(existing, field), getattr(requested, field)
        if not dataclasses.is_dataclass(old):
            if old != new:
                return field, old, new
        elif type(old) is not type(new):
            return field, type(old).__name__, type(new).__name__
        else:
            for part in dataclasses.fields(old):
                old_part, new_part = getattr(old, part.name), getattr(new, part.name)
                if part.name != "lr" and _comparable(old_part) != _comparable(new_part):
                    return f"{field}.{part.name}", old_part, new_part
    return None


def _comparable(value: float | str | tuple[float, ...]) -> bytes | str | int:
    if isinstance(value, tuple):
        return struct.pack(f"<{len(value)}f", *value)
    if isinstance(value, str) or (isinstance(value, int) and value >= 2**24):
        return value
    return struct.pack("<f", value)
