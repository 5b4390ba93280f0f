"""Imports rows by key from a file into a table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...proto.errors import DataLoss, InvalidArgument, not_allowed
from ...proto.row_keys import KeyArray, as_keys
from ..session.table import KeyedRows, Rows, first_nonfinite_row
from .export import Progress
from .storage import format_of, local_copy

_FLOATS = (pa.types.is_float16, pa.types.is_float32, pa.types.is_float64)


def load_rows(
    target: KeyedRows,
    url: str,
    *,
    key_column: str = "key",
    vector_column: str = "vector",
    batch_rows: int = 65536,
    progress: Progress | None = None,
) -> int:
    """Assigns the rows of a Parquet or safetensors file, such as :meth:`export` writes, to the table.

    The file is read twice, and all of it is checked before the first row is assigned. Weights are set, and the
    optimizer state of existing rows stays. Rows whose keys are not in the file do not change. The last row of a
    repeated key counts. When the servers fail meanwhile, the same call may be made again.

    Args:
        url: a path or a URL of fsspec that ends in ``.parquet`` or ``.safetensors``.
        key_column: the column or tensor of keys: integers in [0, 2**64). In Parquet also strings, which
            :func:`sparserow.hash_key` turns into keys.
        vector_column: the column or tensor of weights, (n, dim) floats; in Parquet, lists of fixed or variable size.
        batch_rows: the number of rows that are assigned at a time.
        progress: called with the number of rows assigned so far; None: not called.

    Returns:
        The number of rows assigned.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: ``batch_rows`` is below 1; a column is missing or has another type; a vector's length is not
            the table's dim; a value is not finite, and the text names its row; or a key is null or negative. Nothing
            was assigned.
        DataLoss: the file is damaged. Nothing was assigned.
    """
    if batch_rows < 1:
        raise not_allowed("load.batch_rows", batch_rows, ">= 1")
    kind = format_of(url, ("parquet", "safetensors"))
    with local_copy(url) as path:

        def batches() -> Iterator[tuple[KeyArray, Rows]]:
            read = _read_parquet if kind == "parquet" else _read_safetensors
            return read(path, url, key_column, vector_column, target.schema.dim, batch_rows)

        at = 0
        for keys, rows in batches():
            row = first_nonfinite_row(rows)
            if row is not None:
                raise InvalidArgument(f"{url}: row {at + row} (key {keys[row]}) is not finite; nothing was assigned")
            at += len(keys)
        done = 0
        for keys, rows in batches():
            target.assign(keys, rows)
            done += len(keys)
            if progress is not None:
                progress(done)
    return done


def _read_parquet(
    path: Path, url: str, key_column: str, vector_column: str, dim: int, batch_rows: int
) -> Iterator[tuple[KeyArray, Rows]]:
    try:
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataLoss(f"{url}: this is no whole Parquet file ({error})") from error
    with file:
        for column in (key_column, vector_column):
            if column not in names:
                raise InvalidArgument(f"{url}: there is no column {column!r}; its columns: {', '.join(names)}")
        at = 0
        try:
            for batch in file.iter_batches(batch_rows, columns=[key_column, vector_column]):
                batch.validate(full=True)  # because Arrow reads where a file's offsets and indices lead
                keys = _parquet_keys(batch.column(key_column), f"{url}: column {key_column!r}")
                yield keys, _parquet_vectors(batch.column(vector_column), f"{url}: column {vector_column!r}", dim, at)
                at += len(keys)
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, DataLoss):
                raise
            raise DataLoss(f"{url}: the file is damaged after row {at} ({error})") from error


def _parquet_keys(column: pa.Array, where: str) -> KeyArray:
    if column.null_count:
        raise InvalidArgument(f"{where}: {column.null_count} keys are null; nothing was assigned")
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_integer(column.type):
        return _checked_keys(column.to_numpy(zero_copy_only=False), where)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return as_keys(column.to_pylist())
    raise not_allowed(f"{where}: type", str(column.type), "integers, strings")


def _checked_keys(keys: np.ndarray[Any, Any], where: str) -> KeyArray:
    try:
        return as_keys(keys)
    except InvalidArgument as error:
        raise InvalidArgument(f"{where}: {error}; nothing was assigned") from error


def _parquet_vectors(column: pa.Array, where: str, dim: int, first_row: int) -> Rows:
    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not any(is_float(kind.value_type) for is_float in _FLOATS):
        raise not_allowed(f"{where}: type", str(kind), "lists of float32, float16 or float64")
    values = column.flatten()
    if column.null_count or values.null_count:
        raise InvalidArgument(f"{where}: a vector or a value is null after row {first_row}; nothing was assigned")
    if not pa.types.is_fixed_size_list(kind):
        lengths = np.diff(column.offsets.to_numpy())
        wrong = np.flatnonzero(lengths != dim)
        if len(wrong):
            row = int(wrong[0])
            raise InvalidArgument(
                f"{where}: the vector of row {first_row + row} has {lengths[row]} values, the table has dim {dim}"
            )
    elif kind.list_size != dim:
        raise InvalidArgument(f"{where}: vectors have {kind.list_size} values, the table has dim {dim}")
    return np.ascontiguousarray(values.to_numpy(zero_copy_only=False), dtype=np.float32).reshape(len(column), dim)


def _read_safetensors(
    path: Path, url: str, key_column: str, vector_column: str, dim: int, batch_rows: int
) -> Iterator[tuple[KeyArray, Rows]]:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="np")
    except SafetensorError as error:
        raise DataLoss(f"{url}: this is no whole safetensors file ({error})") from error
    with file:
        names = list(file.keys())
        for tensor in (key_column, vector_column):
            if tensor not in names:
                raise InvalidArgument(f"{url}: there is no tensor {tensor!r}; its tensors: {', '.join(names)}")
        keys, rows = file.get_slice(key_column), file.get_slice(vector_column)
        shapes = (list(keys.get_shape()), list(rows.get_shape()))
        count = shapes[0][0] if len(shapes[0]) == 1 else -1
        if shapes[1] != [count, dim] or rows.get_dtype() not in ("F16", "F32", "F64"):
            raise InvalidArgument(
                f"{url}: {key_column!r} has shape {shapes[0]}, {vector_column!r} {shapes[1]} of {rows.get_dtype()}; "
                f"allowed: [n], and [n, {dim}] of F32, F16 or F64"
            )
        for begin in range(0, count, batch_rows):
            end = min(begin + batch_rows, count)
            found = _checked_keys(keys[begin:end], f"{url}: tensor {key_column!r}")
            yield found, np.ascontiguousarray(rows[begin:end], dtype=np.float32)
