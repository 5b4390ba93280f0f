"""The tables of a session: creates, finds and binds them by name, and sends their learning rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...cpp_ext import _client
from ...cpp_ext.device_step import StepOnDevice, register
from ...proto.errors import FailedPrecondition, InvalidArgument, NotFound
from ...proto.schema import TableSchema
from .device_side import DeviceSide
from .session_parts import Catalog, Placement
from .sparse_optimizer import SparseOptimizer
from .table import KeyedRows


class SessionTables:
    """The tables of a :class:`SessionCore`.

    Args:
        native: the native half of the session.
        catalog: the coordinator, or its stand-in, where tables are registered.
        placement: names the namespace and the row cache's settings.
    """

    def __init__(self, native: _client.NativeSession, catalog: Catalog, placement: Placement) -> None:
        super().__init__()
        self.native = native
        self.catalog = catalog
        self.placement = placement
        self.on_device = StepOnDevice(native)
        self.device_tables: DeviceSide | None = None
        self._optimizer: SparseOptimizer | None = None
        self._schemas: dict[str, TableSchema] = {}
        self._sent_rates: dict[str, float] = {}

    @property
    def namespace(self) -> str:
        """The namespace of every table that this session names."""
        return self.placement.namespace

    @property
    def optimizer(self) -> SparseOptimizer:
        """The learning rates by table; see :attr:`Session.optimizer`."""
        if self._optimizer is None:
            raise FailedPrecondition("session.optimizer: there is no table yet; call session.distribute(model) first")
        return self._optimizer

    def is_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns whether ``optimizer`` is the one that holds the learning rates of the session's tables."""
        return optimizer is self._optimizer

    def learning_rates(self) -> dict[str, float]:
        """Returns the learning rate of each table that a model uses, by name; {} before there is a table."""
        return {} if self._optimizer is None else self._optimizer.learning_rates()

    def set_learning_rates(self, rates: Mapping[str, float]) -> None:
        """Sets the learning rates of the named tables; names of tables that no model uses are ignored."""
        for group in self._optimizer.param_groups if self._optimizer is not None else ():
            group["lr"] = rates.get(group["name"], group["lr"])

    def send_learning_rates(self) -> None:
        """Passes the learning rates that have changed since the last step to the native half."""
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            name, rate = group["name"], float(group["lr"])
            if self._sent_rates[name] != rate and not self.is_on_devices(name):
                self.native.set_lr(f"{self.namespace}/{name}", rate)
                self._sent_rates[name] = rate

    def create_table(self, schema: TableSchema) -> KeyedRows:
        """Creates or finds the table with this schema; see :meth:`Session.create_table`."""
        return self._rows_of(self.catalog.create_table(schema))

    def table(self, name: str) -> KeyedRows:
        """Returns the rows of a table by key; see :meth:`Session.table`."""
        self.native.check_usable()
        if self.is_on_devices(name):
            raise FailedPrecondition(
                f"table {name!r} has placement 'device': its rows are on the devices of the job's ranks, and no server "
                "has them; a checkpoint or a published model holds all of them"
            )
        if name not in self._schemas:
            for schema in self.catalog.list_tables(self.namespace):
                self._schemas.setdefault(schema.name, schema)
        if name not in self._schemas:
            known = ", ".join(sorted(self._schemas)) or "none"
            raise NotFound(f"table {name!r} is not in namespace {self.namespace!r}; tables there: {known}")
        return self._rows_of(self._schemas[name])

    def drop_table(self, name: str) -> None:
        """Removes a table and all of its rows; see :meth:`Session.drop_table`."""
        self.native.check_usable()
        if name in self.bound_tables():
            raise FailedPrecondition(
                f"drop_table: {name!r} is in use by a model of this session; close the session first"
            )
        self.catalog.drop_table(self.namespace, name)
        self._schemas.pop(name, None)

    def bind(
        self, schema: TableSchema, *, num_rows: int, anchor: Tensor, cached: bool = True, frozen: bool = False
    ) -> str:
        """Makes a registered table known to the ops of this process; ``distribute`` calls it.

        Args:
            schema: the schema that the catalog returned, with the table's id.
            num_rows: the number of rows of the layer; ids must be in [0, num_rows).
            anchor: the anchor parameter of the distributed layer; its parameter group holds the learning rate.
            cached: whether the session's row cache, if there is one, keeps this table's rows.
            frozen: whether lookups of a step read the newest rows without a clock, and none is pushed, until
                :meth:`set_frozen` says otherwise.

        Returns:
            The binding's name, ``namespace/table``.

        Raises:
            FailedPrecondition: the table is bound in this process already.
            InvalidArgument: the schema is of another namespace, or ``cache.bytes`` is too small for one more table;
                the text has the smallest value that is enough.
        """
        if schema.namespace != self.namespace:
            raise InvalidArgument(
                f"table {schema.full_name!r} is in another namespace; the session's namespace is {self.namespace!r}"
            )
        self.native.bind(
            schema.full_name,
            table_id=schema.id,
            schema_version=schema.version,
            dim=schema.dim,
            num_rows=num_rows,
            lr=schema.optimizer.lr,
            cached=cached,
            frozen=frozen,
        )
        register(schema.full_name, self.on_device)
        self._note_bound(schema, anchor, frozen=frozen)
        return schema.full_name

    def _note_bound(self, schema: TableSchema, anchor: Tensor, *, frozen: bool) -> None:
        rate = schema.optimizer.lr
        self._schemas[schema.name] = schema
        self._sent_rates[schema.name] = rate
        if self._optimizer is None:
            self._optimizer = SparseOptimizer(schema.name, anchor, lr=rate, frozen=frozen)
        else:
            self._optimizer.add_table(schema.name, anchor, lr=rate, frozen=frozen)

    def set_frozen(self, binding: str, frozen: bool) -> None:
        """Says whether the session's steps train a table from now on.

        Args:
            binding: the name of the table, ``namespace/table``.
            frozen: as for :meth:`bind`.

        Raises:
            FailedPrecondition: the rows of the table are on the devices of the ranks, where all of them train.
        """
        name = binding.removeprefix(f"{self.namespace}/")
        if frozen and self.is_on_devices(name):
            raise FailedPrecondition(
                f"table {name!r} was frozen, and its rows are on the devices of the ranks (placement device), where "
                "all tables train; allowed: placement servers"
            )
        self.optimizer.set_frozen(name, frozen)
        if not self.is_on_devices(name):
            self._pass_frozen(binding, frozen)

    def _pass_frozen(self, binding: str, frozen: bool) -> None:
        self.native.set_frozen(binding, frozen)

    def bind_on_devices(self, schema: TableSchema, anchor: Tensor) -> None:
        """Notes a table on the devices of the ranks, and its learning rate; ``distribute`` calls it.

        Args:
            schema: the schema of the table, with its id.
            anchor: the anchor parameter of the distributed layer; its parameter group holds the learning rate.
        """
        self._note_bound(schema, anchor, frozen=False)

    @property
    def has_device_tables(self) -> bool:
        """Whether the rows of a table are on the devices of the ranks."""
        return self.device_tables is not None and len(self.device_tables.names) > 0

    def is_on_devices(self, name: str) -> bool:
        """Returns whether the rows of this table are on the devices of the ranks."""
        return self.device_tables is not None and name in self.device_tables.names

    def bound_tables(self) -> Sequence[str]:
        """Returns the names of the tables that models of this process use."""
        return tuple(self._sent_rates)

    def _rows_of(self, schema: TableSchema) -> KeyedRows:
        self._schemas[schema.name] = schema
        rate = None if self._optimizer is None else self._optimizer.learning_rates().get(schema.name)
        if rate is not None:
            schema = replace(schema, optimizer=replace(schema.optimizer, lr=rate))
        return KeyedRows(self.native, schema)
