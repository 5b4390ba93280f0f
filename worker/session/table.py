"""Reads and writes rows of a table by key, outside of steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ...cpp_ext import _client
from ...proto.errors import InvalidArgument, not_allowed
from ...proto.row_keys import KeyArray, Keys, as_keys
from ...proto.schema import TableSchema

Rows = NDArray[np.float32]


def first_nonfinite_row(values: Rows) -> int | None:
    """Returns the index of the first row of ``values``, (n, dim) float32, with NaN or Inf; None when there is none."""
    bad = ~np.isfinite(values).all(axis=1)
    return int(bad.argmax()) if bool(bad.any()) else None


class KeyedRows:
    """The rows of one table, by key. Keys are integers in [0, 2**64) or strings; they may repeat and have any order.

    Calls do not belong to a step: they see and change the rows as they are now.

    Attributes:
        schema: the table's schema; ``schema.optimizer.lr`` is the default learning rate of :meth:`push`.
    """

    def __init__(self, native: _client.NativeSession, schema: TableSchema) -> None:
        self.schema = schema
        self._native = native
        self._rows = _client.TableAccess(
            native, name=schema.name, table_id=schema.id, schema_version=schema.version, dim=schema.dim
        )

    def __repr__(self) -> str:
        schema = self.schema
        return f"{type(self).__name__}({schema.full_name!r}, dim={schema.dim}, optimizer={schema.optimizer})"

    def pull(self, keys: Keys) -> Rows:
        """Returns rows of shape (n, dim), float32, in the order of ``keys``, (n).

        A key without a push gives its initial row, and no row is created.
        """
        return self._rows.pull(as_keys(keys))

    def push(self, keys: Keys, grads: Rows, lr: float | None = None) -> None:
        """Applies gradients at once through the table's optimizer; gradients of a repeated key are summed first.

        Args:
            keys: the keys of the rows, (n).
            grads: the gradients, (n, dim), cast to float32.
            lr: the learning rate; None: the table's current rate.

        Raises:
            InvalidArgument: a shape does not fit, the learning rate is negative or not finite, or a gradient is not
                finite; the text names its key. Nothing was applied.
        """
        if lr is not None and not (isinstance(lr, int | float | np.number) and 0 <= lr < float("inf")):
            raise not_allowed("lr", lr, "a finite number >= 0")
        array = as_keys(keys)
        values = np.ascontiguousarray(grads, dtype=np.float32)
        if values.shape == (len(array), self.schema.dim):
            self._check_finite("grads", array, values)
        self._rows.push(array, values, self.schema.optimizer.lr if lr is None else lr)

    def assign(self, keys: Keys, rows: Rows) -> None:
        """Sets the weights of rows and creates rows that do not exist. The optimizer state of existing rows stays.

        Args:
            keys: the keys of the rows, (n). For a repeated key, the last row counts.
            rows: the weights, (n, dim), cast to float32.

        Raises:
            InvalidArgument: a shape does not fit, or a value is not finite.
        """
        array = as_keys(keys)
        values = np.ascontiguousarray(rows, dtype=np.float32)
        if values.shape == (len(array), self.schema.dim):
            self._check_finite("rows", array, values)
        self._rows.assign(array, values)

    def delete(self, keys: Keys) -> int:
        """Removes rows; a later pull gives the initial row. Returns the number of rows that existed."""
        return self._rows.erase(as_keys(keys))

    def scan(self, *, batch_rows: int = 65536) -> Iterator[tuple[KeyArray, Rows]]:
        """Yields all rows that exist, in batches: keys of shape (n), uint64, and rows of shape (n, dim), float32.

        The order is unspecified. Rows that are created or deleted meanwhile may be missing; all others are seen
        exactly once.

        Args:
            batch_rows: the largest number of rows in a batch.

        Raises:
            InvalidArgument: ``batch_rows`` is below 1.
        """
        if batch_rows < 1:
            raise not_allowed("scan.batch_rows", batch_rows, ">= 1")
        for shard in range(self._native.shard_count):
            cursor = 0
            while True:
                keys, rows, cursor = self._rows.scan(shard, cursor, batch_rows)
                if len(keys):
                    yield keys, rows
                if cursor == 0:
                    break

    def _check_finite(self, what: str, keys: KeyArray, values: Rows) -> None:
        row = first_nonfinite_row(values)
        if row is not None:
            raise InvalidArgument(
                f"table {self.schema.name!r}: {what} of key {keys[row]} is not finite; nothing was applied"
            )
