"""The public session: what a training script does is a method of it.

Each method is a function of the room that does the work, whose first argument is the session.
"""

from __future__ import annotations

from ...proto.schema import Constant, Dtype, Init, RowPolicy, TableSchema
from ..checkpoint.restore import restore as _restore
from ..checkpoint.save import keep_rows as _keep_rows, save as _save
from ..layers.dense_rows import dense_on_servers as _dense_on_servers
from ..layers.distribute import distribute as _distribute
from ..layers.gather_tables import gather_tables as _gather_tables
from ..layers.lift import lift_embeddings as _lift_embeddings
from ..prefetch.batches import prefetch as _prefetch
from ..publish.publishing import publish as _publish
from ..row_files.export import export_rows
from ..row_files.keyed_rows import load_rows
from ..row_files.matrices import import_weights as _import_weights
from ..session.otel_trace import record_otel as _record_otel
from ..session.row_optimizers import OptimizerLike, row_optimizer_of
from ..session.session import JobSession
from ..session.table import KeyedRows


class TableRows(KeyedRows):
    """The rows of one table, by key. Keys are integers in [0, 2**64) or strings; they may repeat and have any order.

    Calls do not belong to a step: they see and change the rows as they are now.

    Attributes:
        schema: the table's schema; ``schema.optimizer.lr`` is the default learning rate of :meth:`push`.
    """

    export = export_rows
    load = load_rows


class Session(JobSession):
    """One worker's connection to a job: its tables, its clock, and what a training script does with them.

    :func:`connect` makes it. A session is closed by ``close()`` or a ``with`` statement. Only the thread that trains
    calls ``step``; any thread may look up rows. After ``fork`` the child's copy raises :class:`FailedPrecondition` on
    use, and closing the copy does not affect the parent's session. Workers with unequal numbers of batches put the
    session into torch's ``Join``.
    """

    distribute = _distribute
    lift_embeddings = _lift_embeddings
    dense_on_servers = _dense_on_servers
    gather_tables = _gather_tables
    prefetch = _prefetch
    save = _save
    restore = _restore
    keep_rows = _keep_rows
    publish = _publish
    import_weights = _import_weights
    record_otel = _record_otel

    def create_table(
        self,
        name: str,
        *,
        dim: int,
        optimizer: OptimizerLike,
        dtype: Dtype = "float32",
        init: Init | None = None,
        seed: int = 0,
        policy: RowPolicy | None = None,
    ) -> TableRows:
        """Creates a table whose rows are read and written by key, or finds the table that exists with this schema.

        Args:
            name: the table's name within the session's namespace.
            dim: the number of columns of a row.
            optimizer: the optimizer that the shards run, in any form that :meth:`distribute` takes. Its ``lr`` is the
                default of ``push``.
            dtype: the dtype of stored weights.
            init: the initial rows of keys without a push; None: zeros.
            seed: the seed of the initial rows.
            policy: which keys get a row, and which rows are removed again. None: every key gets a row, and no row is
                removed.

        Returns:
            The rows of the table, by key.

        Raises:
            FailedPrecondition: the table exists with another schema; the text names the field that differs.
            InvalidArgument: an argument is out of its range, or the optimizer has no counterpart on the servers.
        """
        self.core.native.check_usable()
        schema = TableSchema(
            namespace=self.namespace,
            name=name,
            dim=dim,
            optimizer=row_optimizer_of(optimizer, "create_table.optimizer"),
            dtype=dtype,
            init=Constant() if init is None else init,
            seed=seed,
            policy=RowPolicy() if policy is None else policy,
        )
        return TableRows(self.core.native, self.core.create_table(schema).schema)

    def table(self, name: str) -> TableRows:
        """Returns the rows of a table, which are read and written by key.

        Raises:
            NotFound: the namespace has no such table; the text lists its tables.
            FailedPrecondition: the table is on the devices of the ranks.
        """
        return TableRows(self.core.native, self.core.table(name).schema)
