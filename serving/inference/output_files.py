"""Writes the outputs of a published model beside columns of its input, as a Parquet file, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ...proto.errors import FailedPrecondition, InvalidArgument

_ROWS_PER_GROUP = 1 << 16  # at least, but for the last group
_PART = ".part"  # behind the name of a file that is not whole yet


def write_parquet(
    path: Path,
    batches: Iterable[pa.Table],
    predict: Callable[[pa.Table], Any],
    *,
    keep: Sequence[str] = (),
    outputs: Sequence[str] = (),
) -> int:
    """Writes a row for each row of the input; returns their number.

    A tensor (n) becomes a column of numbers, and a tensor (n, d) one of lists of the fixed length d. The columns of a
    model with several outputs have their names; that of a single one is named ``output``. The file has its name when it
    is whole.

    Args:
        path: the path of the file, which is replaced.
        batches: the rows of the input; some rows and their outputs are in memory at a time.
        predict: gives the output of the model for some rows.
        keep: the columns of the input that are copied.
        outputs: the names of the outputs that are written; (): all.

    Raises:
        InvalidArgument: there is no such output, an output is no column, or two columns have one name.
        FailedPrecondition: the file cannot be written.
    """
    part, writer, rows = path.with_name(path.name + _PART), None, 0
    pending: list[pa.Table] = []
    try:
        for batch in batches:
            made = columns_of(predict(batch), outputs, len(batch))
            twice = next((name for name in made if name in keep), None)
            if twice is not None:
                raise InvalidArgument(f"--keep {twice}: the model has an output of this name; allowed: other columns")
            pending.append(pa.table({**{name: batch[name] for name in keep}, **made}))
            rows += len(batch)
            writer = writer or pq.ParquetWriter(part, pending[0].schema, compression="zstd")
            if sum(map(len, pending)) >= _ROWS_PER_GROUP:
                writer.write_table(pa.concat_tables(pending))
                pending = []
        if writer is None:
            raise InvalidArgument("--input: the file has no rows")
        if pending:
            writer.write_table(pa.concat_tables(pending))
        writer.close()
        part.replace(path)
    except OSError as error:
        raise FailedPrecondition(f"--output {path}: {error.strerror or error}") from error
    finally:
        if writer is not None:
            writer.close()
        part.unlink(missing_ok=True)
    return rows


def columns_of(output: Any, wanted: Sequence[str], rows: int) -> dict[str, pa.Array]:
    """Returns the outputs of a model as columns by name.

    Args:
        output: what the model returned: a tensor, a mapping, or a sequence of tensors.
        wanted: the names of the outputs that are returned; (): all.
        rows: the number of rows.

    Raises:
        InvalidArgument: there is no such output, or one of them is no column.
    """
    if isinstance(output, torch.Tensor):
        output = {"output": output}
    elif not isinstance(output, dict):
        output = {f"output_{number}": part for number, part in enumerate(output)}
    for name in wanted:
        if name not in output:
            raise InvalidArgument(f"--only {name}: the model has no such output; it has: {', '.join(output)}")
    return {name: _column(name, output[name], rows) for name in (wanted or output)}


def _column(name: str, value: Any, rows: int) -> pa.Array:
    if not isinstance(value, torch.Tensor) or value.dim() not in (1, 2) or len(value) != rows:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise InvalidArgument(f"output {name!r} is {shape} for {rows} rows; allowed: ({rows}) or ({rows}, d)")
    array = value.detach().cpu()
    numbers = np.ascontiguousarray((array.float() if array.is_floating_point() else array).numpy())
    if array.dim() == 1:
        return pa.array(numbers)
    return pa.FixedSizeListArray.from_arrays(pa.array(numbers.ravel()), numbers.shape[1])
