"""Exports the rows of a table to one file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...proto.row_keys import KeyArray
from ...proto.schema import TableSchema
from ..session.table import KeyedRows, Rows
from .storage import format_of, new_file, scratch_folder

Progress = Callable[[int], None]
METADATA_PREFIX = "sparserow."
_COPY_BYTES = 4 << 20


def export_rows(rows: KeyedRows, url: str, *, batch_rows: int = 65536, progress: Progress | None = None) -> int:
    """Writes the keys and weights of all rows of a table to one file; optimizer state is not written.

    A file has two columns (Parquet) or tensors (safetensors): ``key``, uint64 (n), and ``vector``, float32 (n, dim).
    The table's namespace, name, dim, dtype and optimizer are in its metadata, under names that begin with "sparserow.".
    The order is unspecified. Rows that change meanwhile are written as they are when they are read. Rows that are
    created or deleted meanwhile may be missing.

    Args:
        url: a path or a URL of fsspec that ends in ``.parquet`` or ``.safetensors``. An existing file is replaced when
            the new one is complete.
        batch_rows: the number of rows that are read at a time; a batch is a row group of Parquet.
        progress: called with the number of rows written so far; None: not called.

    Returns:
        The number of rows written.

    Raises:
        NotFound: there is no such folder.
        InvalidArgument: the name has another ending, the URL's kind is unknown, or ``batch_rows`` is below 1.
        FailedPrecondition, ResourceExhausted: the file cannot be written, for lack of permission or space. No part of
            it is left behind.
    """
    batches = rows.scan(batch_rows=batch_rows)
    kind = format_of(url, ("parquet", "safetensors"))
    report = progress or (lambda _: None)
    with new_file(url) as file:
        if kind == "parquet":
            return _write_parquet(file, rows.schema, batches, report)
        return _write_safetensors(file, rows.schema, batches, report, scratch_folder(url))


def _metadata(schema: TableSchema) -> dict[str, str]:
    facts = {
        "namespace": schema.namespace,
        "table": schema.name,
        "dim": str(schema.dim),
        "dtype": schema.dtype,
        "optimizer": type(schema.optimizer).__name__,
    }
    return {METADATA_PREFIX + name: value for name, value in facts.items()}


def _write_parquet(
    file: IO[bytes], schema: TableSchema, batches: Iterator[tuple[KeyArray, Rows]], progress: Progress
) -> int:
    vector = pa.list_(pa.float32(), schema.dim)
    columns = pa.schema([pa.field("key", pa.uint64()), pa.field("vector", vector)], metadata=_metadata(schema))
    written = 0
    # Floats of trained rows do not repeat, so a dictionary of them would be larger than the floats.
    with pq.ParquetWriter(file, columns, use_dictionary=False) as writer:
        for keys, rows in batches:
            values = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), type=vector)
            writer.write_batch(pa.record_batch([pa.array(keys), values], schema=columns), row_group_size=len(keys))
            written += len(keys)
            progress(written)
    return written


def _write_safetensors(
    file: IO[bytes],
    schema: TableSchema,
    batches: Iterator[tuple[KeyArray, Rows]],
    progress: Progress,
    scratch: str | None,
) -> int:
    """Writes the tensors through temporary files, because the header precedes them and has their lengths."""
    written = 0
    with tempfile.TemporaryFile(dir=scratch) as key_bytes, tempfile.TemporaryFile(dir=scratch) as row_bytes:
        for keys, rows in batches:
            key_bytes.write(np.ascontiguousarray(keys).data)
            row_bytes.write(np.ascontiguousarray(rows).data)
            written += len(keys)
            progress(written)
        row_end = written * schema.dim * 4
        header: dict[str, Any] = {
            "__metadata__": _metadata(schema),
            "vector": {"dtype": "F32", "shape": [written, schema.dim], "data_offsets": [0, row_end]},
            "key": {"dtype": "U64", "shape": [written], "data_offsets": [row_end, row_end + 8 * written]},
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in (row_bytes, key_bytes):
            tensor.seek(0)
            while block := tensor.read(_COPY_BYTES):
                file.write(block)
    return written
