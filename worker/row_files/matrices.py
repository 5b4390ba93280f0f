"""Imports weights of a model that was trained elsewhere into tables: row i of a matrix becomes the row of key i."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...proto.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound, not_allowed
from ..session.compiled_module import plain_path
from ..session.session import JobSession
from ..session.table import Rows, first_nonfinite_row
from .export import Progress
from .storage import format_of, local_copy

if TYPE_CHECKING:
    from torch import Tensor

_MOST_INFLATION = 256  # largest inflation of a compressed entry; trained weights have less than 2
# TorchRec's modules hold one weight per table: "...embedding_bags.NAME.weight" in an EmbeddingBagCollection,
# "...embeddings.NAME.weight" in an EmbeddingCollection (torchrec/modules/embedding_modules.py).
_TORCHREC = re.compile(r"(?:^|\.)(?:embedding_bags|embeddings)\.(?P<table>[^.]+)$")


def import_weights(
    session: JobSession,
    source: str | Mapping[str, Tensor | Rows],
    *,
    tables: Mapping[str, str] | None = None,
    batch_rows: int = 65536,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Assigns the embedding matrices of a state dict to tables, so that training goes on from those weights.

    All matrices are checked before the first row is assigned. Weights are set; the optimizer state of existing rows
    stays.

    Args:
        source: a state dict, or the path or fsspec URL of a file with one: ``.pt``, ``.pth`` or ``.bin`` (written by
            ``torch.save``, read with ``weights_only``), ``.safetensors`` or ``.npz``. Entries that are not chosen, such
            as dense weights, are ignored.
        tables: the table in the session's namespace for each entry to import. None imports every entry whose name is
            "NAME" or "NAME.weight", where NAME is a table of the namespace. "module." (DDP) or
            "embedding_bags."/"embeddings." (TorchRec) may precede NAME; parts "_orig_mod" (torch.compile) do not count.
        batch_rows: the number of rows that are assigned at a time.
        progress: called with the number of rows assigned so far; None: not called.

    Returns:
        The number of rows assigned, by table.

    Raises:
        NotFound: there is no such file or table, or the source lacks an entry of ``tables``.
        InvalidArgument: ``batch_rows`` is below 1; no entry fits a table; two entries fit the same table; a matrix is
            not (n, dim) floats; or a value is not finite, and the text names its row. Nothing was assigned.
        FailedPrecondition: an entry is sharded over processes; gather it first.
        DataLoss: the file is damaged.
    """
    if batch_rows < 1:
        raise not_allowed("import_weights.batch_rows", batch_rows, ">= 1")
    with ExitStack() as open_files:
        entries = _read(source, open_files) if isinstance(source, str) else source
        chosen = _match(session, entries, tables)
        matrices = {table: _matrix(session, entries[entry], entry, table) for entry, table in chosen.items()}
        for entry, table in chosen.items():
            _check_finite(matrices[table], entry, batch_rows)
        done = 0
        for table, matrix in matrices.items():
            target = session.core.table(table)
            for begin in range(0, len(matrix), batch_rows):
                rows = _floats(matrix[begin : begin + batch_rows])
                target.assign(np.arange(begin, begin + len(rows), dtype=np.uint64), rows)
                done += len(rows)
                if progress is not None:
                    progress(done)
        return {table: len(matrix) for table, matrix in matrices.items()}


def _read(url: str, open_files: ExitStack) -> Mapping[str, Any]:
    kind = format_of(url, ("torch", "safetensors", "npz"))
    path = open_files.enter_context(local_copy(url))
    try:
        if kind == "npz":
            _check_inflation(path)
            loaded: Any = open_files.enter_context(np.load(path, allow_pickle=False))
        elif kind == "safetensors":
            from safetensors.torch import load_file

            loaded = load_file(path)
        else:
            import torch

            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # each library has errors of its own for a damaged file
        raise DataLoss(f"{url}: this is no whole {kind} file ({' '.join(str(error).split())[:200]})") from error
    if not isinstance(loaded, Mapping):
        raise InvalidArgument(f"{url}: it holds a {type(loaded).__name__}; allowed: a state dict (name -> tensor)")
    return loaded


def _check_inflation(path: Path) -> None:
    """Refuses a file of some megabytes that would inflate to gigabytes in memory, before it is read."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.file_size > _MOST_INFLATION * max(entry.compress_size, 1 << 16):
                raise ValueError(
                    f"entry {entry.filename!r} inflates {entry.compress_size} bytes to {entry.file_size}; allowed: "
                    f"{_MOST_INFLATION} times as many; numpy.savez writes entries uncompressed"
                )


def _match(session: JobSession, entries: Mapping[str, Any], tables: Mapping[str, str] | None) -> dict[str, str]:
    """Returns the table for each entry of the source to import."""
    known = {schema.name for schema in session.core.catalog.list_tables(session.namespace)}
    if tables is not None:
        for entry, table in tables.items():
            if entry not in entries:
                raise NotFound(f"tables: the source has no entry {entry!r}; it has: {_some(entries)}")
            if table not in known:
                raise NotFound(f"tables[{entry!r}]: no table {table!r}; there are: {_some(known)}")
        chosen = dict(tables)
    else:
        fitting = ((str(entry), _table_of(str(entry), known)) for entry in entries)
        chosen = {entry: name for entry, name in fitting if name is not None}
    if not chosen:
        raise InvalidArgument(
            f"source: no entry has the name of a table; entries: {_some(entries)}; tables: {_some(known)}; "
            "name pairs with tables={entry: table}"
        )
    by_table: dict[str, str] = {}
    for entry, table in chosen.items():
        if table in by_table:
            raise InvalidArgument(
                f"source: entries {by_table[table]!r} and {entry!r} are both for table {table!r}; choose one by tables="
            )
        by_table[table] = entry
    return chosen


def _some(names: Any) -> str:
    listed = sorted(map(str, names))
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "") if listed else "none"


def _table_of(entry: str, known: set[str]) -> str | None:
    name = plain_path(entry).removesuffix(".weight")
    candidates = [name, name.removeprefix("module.")]
    found = _TORCHREC.search(name)
    if found is not None:
        candidates.append(found["table"])
    return next((candidate for candidate in candidates if candidate in known), None)


def _matrix(session: JobSession, entry: Any, name: str, table: str) -> Any:
    """Returns the entry, an array or a tensor, after checking that it fits the table."""
    dim = session.core.table(table).schema.dim
    if hasattr(entry, "local_shards") or hasattr(entry, "placements"):
        raise FailedPrecondition(f"source: {name!r} is sharded over processes; gather it into one tensor first")
    shape, dtype = tuple(getattr(entry, "shape", ())), getattr(entry, "dtype", None)
    is_float = getattr(dtype, "is_floating_point", getattr(dtype, "kind", "") == "f")
    if len(shape) != 2 or shape[1] != dim or not is_float:
        raise InvalidArgument(
            f"source: {name!r} has shape {shape} of {dtype}; allowed for table {table!r}: (n, {dim}) floats"
        )
    return entry


def _floats(part: Any) -> Rows:
    if not isinstance(part, np.ndarray):
        part = part.detach().cpu().float().numpy()
    return np.ascontiguousarray(part, dtype=np.float32)


def _check_finite(matrix: Any, entry: str, batch_rows: int) -> None:
    for begin in range(0, len(matrix), batch_rows):
        row = first_nonfinite_row(_floats(matrix[begin : begin + batch_rows]))
        if row is not None:
            raise InvalidArgument(f"source: row {begin + row} of {entry!r} is not finite; nothing was assigned")
