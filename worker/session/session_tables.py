"""The tables of a session: made, found and bound by name, with their learning rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...cpp_ext import _client, device_lookups
from ...proto.errors import FailedPrecondition, InvalidArgument, NotFound
from ...proto.schema import TableSchema
from .row_cache import storage_on
from .session_parts import Catalog, Placement
from .sparse_optimizer import SparseOptimizer
from .table import TableRows


class SessionTables:
    """The tables of a :class:`SessionCore`.

    Args:
        native: the native half.
        catalog: where tables are registered.
        placement: says the namespace and the row cache.
    """

    def __init__(self, native: _client.NativeSession, catalog: Catalog, placement: Placement) -> None:
        super().__init__()
        self.native = native
        self.catalog = catalog
        self.placement = placement
        self.on_device = device_lookups.StepOnDevice(native)
        self._optimizer: SparseOptimizer | None = None
        self._schemas: dict[str, TableSchema] = {}
        self._sent_rates: dict[str, float] = {}

    @property
    def namespace(self) -> str:
        """Of every table this session names."""
        return self.placement.namespace

    @property
    def optimizer(self) -> SparseOptimizer:
        """As :attr:`Session.optimizer`."""
        if self._optimizer is None:
            raise FailedPrecondition("session.optimizer: there is no table yet; call distribute(model, session) first")
        return self._optimizer

    def is_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is the one of the session's tables."""
        return optimizer is self._optimizer

    def learning_rates(self) -> dict[str, float]:
        """Of each table of the models, by name; {} before there is one."""
        return {} if self._optimizer is None else self._optimizer.learning_rates()

    def set_learning_rates(self, rates: Mapping[str, float]) -> None:
        """Sets those of the tables that are named; tables that no model uses are passed over."""
        for group in self._optimizer.param_groups if self._optimizer is not None else ():
            group["lr"] = rates.get(group["name"], group["lr"])

    def send_learning_rates(self) -> None:
        """Tells the native half those that have changed since the last step."""
        if self._optimizer is None:
            return
        for name, rate in self._optimizer.learning_rates().items():
            if self._sent_rates[name] != rate:
                self.native.set_lr(f"{self.namespace}/{name}", rate)
                self._sent_rates[name] = rate

    def create_table(self, schema: TableSchema) -> TableRows:
        """As :meth:`Session.create_table`, of a whole schema."""
        return self._rows_of(self.catalog.create_table(schema))

    def table(self, name: str) -> TableRows:
        """As :meth:`Session.table`."""
        self.native.check_usable()
        if name not in self._schemas:
            for schema in self.catalog.list_tables(self.namespace):
                self._schemas.setdefault(schema.name, schema)
        if name not in self._schemas:
            known = ", ".join(sorted(self._schemas)) or "none"
            raise NotFound(f"table {name!r} is not in namespace {self.namespace!r}; tables there: {known}")
        return self._rows_of(self._schemas[name])

    def drop_table(self, name: str) -> None:
        """As :meth:`Session.drop_table`."""
        self.native.check_usable()
        if name in self.bound_tables():
            raise FailedPrecondition(
                f"drop_table: {name!r} is in use by a model of this session; close the session first"
            )
        self.catalog.drop_table(self.namespace, name)
        self._schemas.pop(name, None)

    def bind(self, schema: TableSchema, *, num_rows: int, anchor: Tensor, cached: bool = True) -> str:
        """Makes a registered table known to the ops of this process; what ``distribute`` calls.

        Args:
            schema: as the catalog returned it.
            num_rows: ids must be below.
            anchor: of the distributed layer; its parameter group carries the learning rate.
            cached: whether the session's row cache, where it has one, keeps its rows.

        Returns:
            The binding's name, ``namespace/table``.

        Raises:
            FailedPrecondition: the table is bound in this process already.
            InvalidArgument: ``cache.bytes`` is too small for one more table (says the least).
        """
        if schema.namespace != self.namespace:
            raise InvalidArgument(f"table {schema.full_name!r}: the session's namespace is {self.namespace!r}")
        rate = schema.optimizer.lr
        self.native.bind(
            schema.full_name,
            table_id=schema.id,
            schema_version=schema.version,
            dim=schema.dim,
            num_rows=num_rows,
            lr=rate,
            cached=cached,
        )
        device_lookups.register(schema.full_name, self.on_device)
        self._schemas[schema.name] = schema
        self._sent_rates[schema.name] = rate
        if self._optimizer is None:
            self._optimizer = SparseOptimizer(schema.name, anchor, lr=rate)
        else:
            self._optimizer.add_table(schema.name, anchor, lr=rate)
        return schema.full_name

    def bound_tables(self) -> Sequence[str]:
        """Names of the tables that models of this process use."""
        return tuple(self._sent_rates)

    def place_cache(self, model: torch.nn.Module) -> None:
        """Has the row cache's rows where its ``storage`` says for this model; what ``distribute`` and
        ``lift_embeddings`` call. Nothing without a cache.

        Raises:
            InvalidArgument: the model's device cannot hold the cache.
            FailedPrecondition: Triton is not installed.
        """
        cache = self.placement.cache
        if cache is None:
            return
        on_cuda = (parameter.device for parameter in model.parameters() if parameter.is_cuda)
        make = storage_on(cache, next(on_cuda, torch.device("cpu")))
        if make is not None:
            self.native.set_cache_storage(make)

    def _rows_of(self, schema: TableSchema) -> TableRows:
        self._schemas[schema.name] = schema
        rate = None if self._optimizer is None else self._optimizer.learning_rates().get(schema.name)
        if rate is not None:
            schema = replace(schema, optimizer=replace(schema.optimizer, lr=rate))
        return TableRows(self.native, schema)
