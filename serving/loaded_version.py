"""Loads a version of a model: the weights of the rows in this process's slots, into the native store."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..cpp_ext import _server
from ..proto.errors import DataLoss
from ..proto.native import init_parameters
from ..proto.process.cores import available_cores
from ..proto.published.manifest import ModelManifest, PublishedTable, ServedDtype
from ..proto.published.registry import ModelRegistry
from ..proto.published.row_parts import Keys, read_rows, read_tensors
from ..proto.schema import TableSchema
from .client.shard_assignment import ShardAssignment
from .row_memory import RowMemory
from .version_features import VersionFeatures

Progress: TypeAlias = Callable[[int], None]
_TIERED_ROWS = 4096  # rows of one assignment to a store with an SSD, which must make room for them
_ROWS_OF_A_TASK = 32_768
_MOST_THREADS = 8
_READERS = 2  # files that are read while another one is installed


@dataclasses.dataclass(frozen=True)
class ServedTable:
    """A served table.

    Attributes:
        schema: the table's schema in training.
        dtype: the dtype of the served rows.
    """

    schema: TableSchema
    dtype: ServedDtype


@dataclasses.dataclass
class LoadedVersion:
    """A loaded version. The store is thread-safe.

    Attributes:
        model: the name of the model.
        version: the number of the version; 0: it was not published, and its rows come only from the training cluster.
        cluster_id: the id of the cluster that trained it, which live sync follows.
        namespace: the namespace of its tables in that cluster.
        tables: the tables by name.
        store: the rows, with their versions in training.
        slots: for each slot, the version up to which the store has every change, (slot_count) uint64; 0: nothing.
        features: makes keys of values; None: the version was not published.
    """

    model: str
    version: int
    cluster_id: int
    namespace: str
    tables: dict[str, ServedTable]
    store: _server.Store
    slots: NDArray[np.uint64]
    features: VersionFeatures | None = None

    @property
    def slot_count(self) -> int:
        """The number of slots of the cluster that trained the version."""
        return int(self.store.slot_count)


def with_tables(store: _server.Store, tables: dict[str, ServedTable]) -> _server.Store:
    """Creates the tables in an empty store and returns the store.

    Absent rows read as they do in training, rounded to the served dtype.
    """
    for table in tables.values():
        store.create_table(_weights_only(table))
    return store


def load_version(
    registry: ModelRegistry,
    manifest: ModelManifest,
    place: ShardAssignment,
    *,
    memory: RowMemory | None = None,
    progress: Progress | None = None,
) -> LoadedVersion:
    """Loads the rows of a version that are in this process's slots.

    Args:
        registry: the registry that holds the version.
        manifest: the manifest of the version.
        place: the shard and replica of this process.
        memory: the storage for the rows; None: memory without a budget.
        progress: called with the number of rows read so far; None: not called.

    Raises:
        DataLoss: a part fails its checksum.
        NotFound: a part is missing.
        ResourceExhausted: the rows do not fit into the budget.
    """
    folder = registry.folder(manifest.model, manifest.version)
    tables = {table.schema.name: ServedTable(table.schema, table.dtype) for table in manifest.tables}
    owned = place.owned(manifest.slot_count)
    slots = read_tensors(folder, manifest.slots).get("version")
    if slots is None or slots.shape != (manifest.slot_count,):
        raise DataLoss(
            f"{folder.url}/{manifest.slots.file}: it does not have a version for each of {manifest.slot_count} slots"
        )
    memory = memory or RowMemory()
    name = f"{manifest.model}@{manifest.version}"
    store = with_tables(memory.make_store(manifest.slot_count, manifest.cluster_id, place, name), tables)
    parts = [(table, part) for table in manifest.tables for part in table.parts]
    threads = 1 if memory.ssd_path is not None else min(_MOST_THREADS, available_cores())
    step = _TIERED_ROWS if memory.ssd_path is not None else _ROWS_OF_A_TASK
    done, files = 0, _server.FileReader()
    with (
        ThreadPoolExecutor(threads, "sparserow-load") as writers,
        ThreadPoolExecutor(_READERS, "sparserow-read") as readers,
    ):

        def read(at: int) -> Future[tuple[Keys, NDArray[np.uint64], NDArray[Any]]] | None:
            if at >= len(parts):
                return None
            table, part = parts[at]
            return readers.submit(read_rows, folder, part, table.dtype, table.schema.dim, files)

        coming = deque(read(at) for at in range(_READERS))
        for at, (table, part) in enumerate(parts):
            future = coming.popleft()
            assert future is not None
            keys, versions, rows = future.result()
            del future
            coming.append(read(at + _READERS))  # the next parts are read while this one is written
            table_id = table.schema.id
            if place.shards > 1:
                mine = owned[_server.slots_of(table_id, np.ascontiguousarray(keys), manifest.slot_count)]
                keys, versions, rows = keys[mine], versions[mine], rows[mine]
            slices = [slice(begin, begin + step) for begin in range(0, len(keys), step)]
            install = partial(_install, store, table, keys, versions, rows)
            list(writers.map(install, slices))
            done += part.rows
            if progress is not None:
                progress(done)
    return LoadedVersion(
        model=manifest.model,
        version=manifest.version,
        cluster_id=manifest.cluster_id,
        namespace=manifest.namespace,
        tables=tables,
        store=store,
        slots=np.array(slots, dtype=np.uint64),
        features=VersionFeatures(folder, manifest.features, name),
    )


def _install(
    store: _server.Store,
    table: PublishedTable,
    keys: Keys,
    versions: NDArray[np.uint64],
    rows: NDArray[Any],
    some: slice,
) -> None:
    """Installs a slice of the rows, (n, dim); copies them first when the file's are not aligned or contiguous."""
    wanted, kept_versions = np.ascontiguousarray(keys[some]), np.ascontiguousarray(versions[some])
    stored = np.ascontiguousarray(rows[some])
    if table.dtype == "int8":
        store.assign_versions(table.schema.id, wanted, kept_versions, stored)
        return
    counts, no_state = np.zeros(len(wanted), np.uint32), np.empty(0, np.float32)
    store.install(table.schema.id, wanted, kept_versions, counts, stored, no_state)


def _weights_only(table: ServedTable) -> _server.TableSchema:
    schema = table.schema
    kind, a, b = init_parameters(schema.init)
    return _server.TableSchema(
        id=schema.id,
        name=schema.full_name,
        dim=schema.dim,
        version=schema.version,
        dtype=table.dtype,
        seed=schema.seed,
        init=_server.InitSpec(kind=kind, a=a, b=b),
    )
