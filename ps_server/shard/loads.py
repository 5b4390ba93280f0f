"""The shard's load of a checkpoint: it reads files, and installs the rows of the slots that it owns."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...cpp_ext import _server
from ...proto import control_pb2 as pb
from ...proto.checkpoint import manifest as files
from ...proto.checkpoint.accepted import as_float32, loses_state, stored_as
from ...proto.checkpoint.file_check import BlockReader
from ...proto.checkpoint.folder import Folder
from ...proto.checkpoint.row_parts import Rows, decode_rows
from ...proto.checkpoint.tensor_file import Tensor, decode
from ...proto.checkpoint.urls import check_url
from ...proto.errors import DataLoss, Unavailable
from ...proto.process.cores import available_cores
from ...proto.schema import TableSchema
from ...proto.schema_message import schema_of_message
from .engine import ShardEngine

FILTER_PARTS = ("slot", "end", "image")  # parts of the tensor names filter.TABLE_ID.PART in a file of slots

_SEQUENCE_MASK = np.uint64((1 << 48) - 1)
_BATCH_BYTES = 8 << 20  # bytes of rows that each loader installs at once
_LEAST_BATCH_BYTES = 1 << 20  # the least such number: it is a 128th of a small memory budget
# One thread more than cores, because one of them waits for the disk. Each has the memory of one file, of which together
# they have at most a 16th of a memory budget, or one.
_LOADERS = min(4, 1 + available_cores())


@dataclass(frozen=True)
class RowFile:
    """A file with rows of one or several tables.

    Attributes:
        folder: the folder of its checkpoint.
        facts: its name, size and checksum.
        link: the position of its checkpoint in the chain.
        tables: the tables to load from it, by saved table id.
    """

    folder: Folder
    facts: files.FileFacts
    link: int
    tables: dict[int, pb.LoadTable] = field(default_factory=dict)

    def read(self, cluster_id: int, reader: BlockReader) -> Iterable[tuple[pb.LoadTable, Rows]]:
        """Yields the rows of its tables, after comparing the file with its manifest.

        Args:
            cluster_id: the id of the cluster that wrote the file.
            reader: reads local files; the memory of a file is used again when its rows are gone.

        Raises:
            DataLoss: the file is missing or damaged; the text names it.
        """
        where = f"{self.folder.url}/{self.facts.file}"
        parts = decode_rows(files.check_file(self.folder, self.facts, reader), where, is_checked=True)
        there = {facts.table_id: rows for facts, rows in parts if facts.cluster_id == cluster_id}
        for saved_id, table in self.tables.items():
            if saved_id not in there:
                first = parts[0][0]
                raise DataLoss(
                    f"{where}: the file has rows of {first.table} of cluster {first.cluster_id:x}; the manifest "
                    f"expects table {saved_id} of cluster {cluster_id:x}"
                )
            yield table, there[saved_id]


class _Chain:
    """The files that a request loads: those of a checkpoint and of the checkpoints that it adds to."""

    def __init__(self, request: pb.LoadRequest) -> None:
        folder = Folder(check_url("url", request.url))
        self.links = files.read_chain(folder, request.name)
        self.folders = [folder / link.name for link in self.links]
        self.cluster_id = self.links[-1].cluster_id
        self._targets = {table.saved_table_id: table for table in request.tables if not table.without_rows}
        self.has_renamed = any(table.schema.id != saved for saved, table in self._targets.items())

    def row_files(self, link: int, is_wanted: Callable[[files.PartEntry, pb.LoadTable], bool]) -> list[RowFile]:
        """Returns the row files of one checkpoint of the chain, each once, with the tables that are wanted from it."""
        found: dict[str, RowFile] = {}
        for table in self.links[link].tables:
            target = self._targets.get(table.schema.id)
            for part in table.parts if target is not None else ():
                if target is not None and is_wanted(part, target):
                    file = found.setdefault(part.file, RowFile(self.folders[link], part, link))
                    file.tables[table.schema.id] = target
        return list(found.values())


class CheckpointLoads:
    """The loads of one shard, one at a time.

    Args:
        engine: the engine that receives the rows.
    """

    def __init__(self, engine: ShardEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()  # held during a load

    def verify(self, request: pb.LoadRequest) -> Iterator[pb.LoadReply]:
        """Reads this shard's share of the files and compares them with their manifests; yields the bytes read so far.

        Raises:
            DataLoss: a file is missing or damaged; the text names it.
        """
        chain, size, reader = _Chain(request), 0, _server.FileReader()
        slots = [
            (folder, facts) for folder, link in zip(chain.folders, chain.links, strict=True) for facts in link.slots
        ]
        for folder, facts in slots[request.turn :: request.turns]:
            decode(files.check_file(folder, facts), facts.file)
            size += facts.bytes
            yield pb.LoadReply(bytes=size)
        rows = [file for link in range(len(chain.links)) for file in chain.row_files(link, lambda *_: True)]
        mine = rows[request.turn :: request.turns]
        for file in self._each(mine, lambda file: deque(file.read(chain.cluster_id, reader), 0)):
            size += file.facts.bytes
            yield pb.LoadReply(bytes=size)

    def load(self, request: pb.LoadRequest) -> Iterator[pb.LoadReply]:
        """Empties tables and fills them with this shard's rows of a checkpoint; yields its progress after each file.

        The rows are refused before the first table is emptied, and stay refused, also after a failure, until
        :meth:`ShardEngine.refuse`.

        Raises:
            DataLoss: a file is missing or damaged; the text names it.
            ResourceExhausted: the rows have no room here.
            DeadlineExceeded: an earlier request takes too long.
        """
        with self._lock:  # waits for a load whose caller has gone
            yield from self._load(request)

    def _load(self, request: pb.LoadRequest) -> Iterator[pb.LoadReply]:
        engine = self._engine
        engine.refuse(
            pb.Refusal(
                code=Unavailable.number,
                message=f"shard {engine.shard} is loading rows of a checkpoint",
                table_ids=sorted({*engine.follow_gate.refused_tables, *(table.schema.id for table in request.tables)}),
            )
        )
        if request.HasField("route"):
            engine.note_owned(request.route)
        engine.store.set_lineage(request.lineage)
        chain = _Chain(request)
        owned, size = engine.owned_slots, 0
        newest: list[dict[str, Tensor]] = []  # the slots' files of the checkpoint itself, not of its bases
        versions = np.zeros(engine.slot_count, np.uint64)
        whole_since = np.zeros(engine.slot_count, np.uint32)  # a slot's rows in earlier checkpoints are outdated
        for link, (folder, manifest) in enumerate(zip(chain.folders, chain.links, strict=True)):
            for facts in manifest.slots:
                # Renamed rows come from other slots, which another shard may own.
                if not chain.has_renamed and not owned[facts.first_slot : facts.end_slot].any():
                    continue
                _, tensors = decode(files.check_file(folder, facts), facts.file)
                at = tensors["slot"].values
                versions[at] = tensors["version"].values
                whole_since[at[tensors["whole"].values]] = link
                size += facts.bytes
                if manifest is chain.links[-1]:
                    newest.append(tensors)
        schemas = [schema_of_message(table.schema) for table in request.tables]
        engine.remake_tables(schemas)
        fresh = engine.store.change_versions() if request.in_place else None
        self._load_filters(zip(request.tables, schemas, strict=True), newest)

        def is_wanted(part: files.PartEntry, table: pb.LoadTable) -> bool:
            return table.schema.id != table.saved_table_id or bool(owned[part.first_slot : part.end_slot].any())

        reader = _server.FileReader()

        def load_file(file: RowFile) -> None:
            for table, rows in file.read(chain.cluster_id, reader):
                self._install(table, rows, file.link, request, whole_since, fresh)

        for link in range(len(chain.links)):
            # Files of one checkpoint have different rows; files of the next checkpoint in the chain are loaded after
            # them.
            row_files = chain.row_files(link, is_wanted)
            for file in self._each(row_files, load_file):
                size += file.facts.bytes
                yield pb.LoadReply(bytes=size)
        if not request.in_place:
            mine = np.flatnonzero(owned).astype(np.uint32)
            engine.store.set_sequences(mine, versions[mine] & _SEQUENCE_MASK)
        loaded = {table.schema.id for table in request.tables}
        rows = sum(table.rows for table in engine.table_stats() if table.table_id in loaded)
        if request.windows_json:
            engine.install_jobs(json.loads(request.windows_json))
        yield pb.LoadReply(rows=rows, bytes=size)

    def _load_filters(
        self, tables: Iterable[tuple[pb.LoadTable, TableSchema]], slots_files: list[dict[str, Tensor]]
    ) -> None:
        """Fills the admission filters of tables that count keys and still have their id, because hashes depend on the
        id.
        """
        engine = self._engine
        for table, schema in tables:
            policy = schema.policy
            most = -(-policy.admit_capacity // engine.slot_count)  # number of keys of a slot
            if table.saved_table_id != table.schema.id or policy.admit_after <= 1:
                continue
            for tensors in slots_files:
                if f"filter.{table.schema.id}.slot" not in tensors:
                    continue
                which, ends, image = (tensors[f"filter.{table.schema.id}.{part}"].values for part in FILTER_PARTS)
                for slot, cells in zip(which.tolist(), np.split(image, ends[:-1]), strict=True):
                    if engine.owned_slots[slot] and len(cells) - 1 <= max(1, most):  # otherwise the slot counts from 0
                        engine.store.load_filter(table.schema.id, slot, np.ascontiguousarray(cells))

    def _install(
        self,
        table: pb.LoadTable,
        rows: Rows,
        link: int,
        request: pb.LoadRequest,
        whole_since: NDArray[np.uint32],
        fresh: NDArray[np.uint64] | None,
    ) -> None:
        engine = self._engine
        slots = _server.slots_of(table.schema.id, rows.keys, engine.slot_count)
        saved_slots = slots
        if table.saved_table_id != table.schema.id:
            saved_slots = _server.slots_of(table.saved_table_id, rows.keys, engine.slot_count)
        mine = engine.owned_slots[slots] & (whole_since[saved_slots] <= link)
        if not mine.all():
            rows, slots = rows.take(mine), slots[mine]
        versions = rows.versions
        if fresh is not None:  # those of the checkpoint may be versions of other rows by now
            versions = fresh[slots]
        elif table.saved_table_id != table.schema.id:  # other slots, whose sequences begin again
            versions = np.full(len(rows.keys), request.lineage << 48, np.uint64)
        count = len(rows.keys)
        budget = engine.store.memory_budget_bytes or _BATCH_BYTES * 128
        batch_bytes = min(_BATCH_BYTES, max(_LEAST_BATCH_BYTES, budget // 128))
        per_batch = max(1, batch_bytes * count // max(1, rows.weights.nbytes + rows.state.nbytes))
        for begin in range(0, count, per_batch):  # a whole batch must fit in memory
            batch = slice(begin, begin + per_batch)
            state = np.empty((0,), np.float32) if loses_state(table.changed) else rows.state[batch]
            engine.store.install(
                table.schema.id,
                rows.keys[batch],
                versions[batch],
                rows.update_counts[batch],
                self._present_weights(table, rows.keys[batch], rows.weights[batch]),
                state,
                rows.age_steps[batch],
                rows.push_seconds[batch],
            )

    def _present_weights(self, table: pb.LoadTable, keys: NDArray[np.uint64], weights: NDArray[Any]) -> NDArray[Any]:
        """Returns saved weights with the dim and dtype that the table has; a column that they lack is initial."""
        if "dim" not in table.changed and "dtype" not in table.changed:
            return weights
        schema = schema_of_message(table.schema)
        whole = as_float32(weights)
        if weights.shape[1] < schema.dim:
            whole, saved = np.empty((len(keys), schema.dim), np.float32), whole
            # A key without a row reads as its initial row. One that has a row came from an earlier link of the chain,
            # whose new columns are initial as well.
            self._engine.store.pull_into(schema.id, keys, whole)
            whole[:, : saved.shape[1]] = saved
        return stored_as(whole, schema.dtype)

    def _each(self, row_files: Sequence[RowFile], work: Callable[[RowFile], Any]) -> Iterator[RowFile]:
        """Does the work of each file, several at a time, and yields the files in their order; the first failure ends
        it.
        """
        budget = self._engine.store.memory_budget_bytes
        largest = max((file.facts.bytes for file in row_files), default=1)
        loaders = min(_LOADERS, max(1, budget // 16 // largest)) if budget else _LOADERS
        with ThreadPoolExecutor(loaders, "sparserow-load") as workers:
            waiting = deque[tuple[RowFile, Future[None]]]()
            try:
                for file in row_files:
                    waiting.append((file, workers.submit(work, file)))
                    if len(waiting) > 2 * loaders:
                        done, future = waiting.popleft()
                        future.result()
                        yield done
                for done, future in waiting:
                    future.result()
                    yield done
            finally:
                workers.shutdown(cancel_futures=True)
