"""Rows of a table by key, outside of steps: ``session.table(name)``."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ...cpp_ext import _client
from ...proto.errors import InvalidArgument
from ...proto.row_keys import KeyArray, Keys, as_keys
from ...proto.schema import TableSchema

Rows = NDArray[np.float32]


def first_nonfinite_row(values: Rows) -> int | None:
    """The first row of (n, dim) with NaN or Inf in it; None when there is none."""
    bad = ~np.isfinite(values).all(axis=1)
    return int(bad.argmax()) if bool(bad.any()) else None


class TableRows:
    """One table's rows. Keys are integers in [0, 2**64) or strings, may repeat and come in any order.

    Calls here have no clock: they see and change the rows as they are now.

    Attributes:
        schema: of the table; ``schema.optimizer.lr`` is the default rate of :meth:`push`.
    """

    def __init__(self, native: _client.NativeSession, schema: TableSchema) -> None:
        self.schema = schema
        self._native = native
        self._rows = _client.TableAccess(native, table_id=schema.id, schema_version=schema.version, dim=schema.dim)

    def pull(self, keys: Keys) -> Rows:
        """(n, dim) float32, in the order of keys. A key without a push gives its initial row, and no row is created."""
        return self._rows.pull(as_keys(keys))

    def push(self, keys: Keys, grads: Rows, lr: float | None = None) -> None:
        """Applies gradients at once through the table's optimizer; those of a repeated key are summed first.

        Args:
            keys: (n).
            grads: (n, dim), cast to float32.
            lr: None is the table's current rate.

        Raises:
            InvalidArgument: a shape does not fit, or a gradient is not finite (names the key); nothing was applied.
        """
        array = as_keys(keys)
        values = np.ascontiguousarray(grads, dtype=np.float32)
        if values.shape == (len(array), self.schema.dim):
            self._check_finite("grads", array, values)
        self._rows.push(array, values, self.schema.optimizer.lr if lr is None else lr)

    def assign(self, keys: Keys, rows: Rows) -> None:
        """Sets weights (n, dim), creating rows; optimizer state of existing rows stays. The last of a repeated key
        counts.

        Raises:
            InvalidArgument: a shape does not fit, or a value is not finite.
        """
        array = as_keys(keys)
        values = np.ascontiguousarray(rows, dtype=np.float32)
        if values.shape == (len(array), self.schema.dim):
            self._check_finite("rows", array, values)
        self._rows.assign(array, values)

    def delete(self, keys: Keys) -> int:
        """Removes rows; a later pull gives the initial row. Returns how many existed."""
        return self._rows.erase(as_keys(keys))

    def scan(self, *, batch_rows: int = 65536) -> Iterator[tuple[KeyArray, Rows]]:
        """All rows that exist, in batches of at most ``batch_rows``: ((n) uint64 keys, (n, dim) float32 rows).

        Order is unspecified; rows created or deleted meanwhile may or may not be seen, others exactly once.
        """
        if batch_rows < 1:
            raise InvalidArgument(f"scan: batch_rows {batch_rows!r} is not allowed; allowed: >= 1")
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
