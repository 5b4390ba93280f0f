"""A shard's part of a checkpoint: rows of a cut to files, and files to rows."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ...cpp_ext import _server
from ...proto import control_pb2 as pb
from ...proto.checkpoint.folder import Folder
from ...proto.checkpoint.manifest import FileFacts, check_file
from ...proto.checkpoint.row_parts import PartFacts, Rows, decode_rows, encode_rows
from ...proto.checkpoint.tensor_file import Encoded, Tensor, decode, encode
from ...proto.errors import DataLoss, NotFound, Unavailable
from ...proto.schema import Dtype
from ...proto.schema_message import schema_of_message
from .engine import ShardEngine

log = logging.getLogger(__name__)

_SEQUENCE_MASK = np.uint64((1 << 48) - 1)
# A cut whose dump nobody asks for is forgotten, so that writes do not go on saving images for it.
_UNCLAIMED_SEC = 60.0
_ENDED_KNOWN = 64  # saves that are over, of which a late cut is refused
_BATCH_BYTES = 8 << 20  # of rows that are installed at once, by each loader
_LEAST_BATCH_BYTES = 1 << 20  # the same under a small memory budget, of which it is a 128th
_NICE = 10  # of threads that write rows, below those that serve them
_FILTER_PARTS = ("slot", "end", "image")  # of the tensors filter.TABLE_ID.PART in a file of slots
_LOADERS = max(1, min(4, os.cpu_count() or 1))

Item = TypeVar("Item")


class ShardCheckpoints:
    """Cuts, dumps and loads of one shard. The snapshot of a cut belongs to one save and ends with its dump, or when
    another save makes its cut: a coordinator makes one at a time, so nobody will ask for what the former one left.

    Args:
        engine: the rows.
    """

    def __init__(self, engine: ShardEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._cuts: dict[str, tuple[_server.Snapshot, threading.Timer]] = {}  # by the save's name; guarded by _lock
        self._ended: dict[str, None] = {}  # the last saves that are over, oldest first; guarded by _lock
        self._load_lock = threading.Lock()  # one load at a time

    def cut(self, request: pb.CutRequest) -> pb.CutReply:
        """Keeps rows of one instant for :meth:`dump`.

        Raises:
            SparserowError: as :meth:`ShardEngine.cut`.
        """
        since = self._since(request)
        with self._lock:
            left = list(self._cuts)
        for save in left:
            log.info("the cut of save %s was left behind; it is forgotten", save)
            self.end(save)
        snapshot, windows = self._engine.cut(request, since)
        unclaimed = threading.Timer(_UNCLAIMED_SEC, self.end, (request.save,))
        unclaimed.daemon = True
        with self._lock:
            is_over = request.save in self._ended
            if not is_over:
                self._cuts[request.save] = snapshot, unclaimed
                unclaimed.start()
        if is_over:
            snapshot.end()
        return pb.CutReply(windows_json=json.dumps(windows))

    def _since(self, request: pb.CutRequest) -> NDArray[np.uint64] | None:
        """Versions of slots in the checkpoint that only changes are saved since; 0 where it has nothing of a slot."""
        if not request.base_url:
            return None
        since, folder = np.zeros(self._engine.slot_count, np.uint64), Folder(request.base_url)
        for file in request.base_slots:
            _, tensors = decode(_read(folder, file), file.file)
            since[tensors["slot"].values] = tensors["version"].values
        return since

    def end(self, save: str) -> None:
        """Forgets a cut that is not being dumped; harmless when there is none."""
        snapshot = self._take(save)
        if snapshot is not None:
            snapshot.end()

    def _take(self, save: str) -> _server.Snapshot | None:
        """What is kept for a save, which has no cut from now on."""
        with self._lock:
            self._ended[save] = None
            for old in list(self._ended)[:-_ENDED_KNOWN]:
                del self._ended[old]
            snapshot, unclaimed = self._cuts.pop(save, (None, None))
        if unclaimed is not None:
            unclaimed.cancel()
        return snapshot

    def dump(self, request: pb.DumpRequest) -> Iterator[pb.DumpReply]:
        """Writes the rows of a cut, a file at a time, and says of each that it is on the disk.

        Raises:
            NotFound: there is no such cut.
            SparserowError: a file cannot be written, or the cut was given up.
        """
        snapshot = self._take(request.save)
        if snapshot is None:
            raise NotFound(f"shard {self._engine.shard}: there is no cut of save {request.save}")
        try:
            folder = Folder(request.url)
            part_bytes = snapshot.page_bytes(request.part_bytes)
            for schema in snapshot.tables:
                yield from self._dump_table(snapshot, schema, folder, part_bytes)
            yield pb.DumpReply(slots=_write(folder, f"slots.{self._engine.shard}.safetensors", self._slots(snapshot)))
            yield pb.DumpReply(stats=pb.DumpStats(**snapshot.stats()))
        finally:
            snapshot.end()

    def _dump_table(
        self, snapshot: _server.Snapshot, schema: _server.TableSchema, folder: Folder, part_bytes: int
    ) -> Iterator[pb.DumpReply]:
        """One file is being written while the rows of the next are taken."""
        with ThreadPoolExecutor(1, "sparserow-write", give_way) as writer:
            writing: Future[pb.DumpReply] | None = None
            for part in self._parts(snapshot, schema, part_bytes):
                if writing is not None:
                    yield writing.result()
                writing = writer.submit(_write_part, folder, *part)
            if writing is not None:
                yield writing.result()

    def _parts(
        self, snapshot: _server.Snapshot, schema: _server.TableSchema, part_bytes: int
    ) -> Iterator[tuple[str, PartFacts, Rows]]:
        """Rows that changed meanwhile have files of their own, before their slots' turn, so that they leave the side
        buffer as fast as the disk allows.
        """
        engine, done, number = self._engine, 0, 0
        while done < engine.slot_count:
            page = snapshot.next_images(schema.id, max_bytes=part_bytes)
            if not len(page[0]):
                page = snapshot.next(schema.id, max_bytes=part_bytes)
                done = page[8]
            rows = Rows(*page[:7])
            first, end = page[7:]
            if not len(rows.keys):
                continue
            facts = PartFacts(
                engine.cluster_id,
                schema.name,
                schema.id,
                cast(Dtype, schema.dtype),
                engine.slot_count,
                first_slot=first,
                end_slot=end,
            )
            name = f"rows.{schema.name.replace('/', '.')}.{engine.shard}.{number}.safetensors"
            yield name, facts, rows
            number += 1

    def _slots(self, snapshot: _server.Snapshot) -> Encoded:
        owned = np.flatnonzero(self._engine.owned_slots).astype(np.uint32)
        tensors = {
            "slot": Tensor("U32", owned),
            "version": Tensor("U64", snapshot.slot_versions[owned]),
            "whole": Tensor("BOOL", snapshot.whole_slots[owned]),
            **_filters(snapshot, owned),
        }
        return encode(tensors, {"sparserow.cluster": f"{self._engine.cluster_id:x}"})

    def load(self, request: pb.LoadRequest) -> Iterator[pb.LoadReply]:
        """Empties tables and fills them with this shard's rows of a checkpoint; says how far it is after each file.

        Their rows are refused from before the first is emptied, also after a failure, until :meth:`ShardEngine.refuse`.

        Raises:
            DataLoss: a file is missing or damaged (names it).
            ResourceExhausted: the rows have no room here.
            DeadlineExceeded: a request that came before goes on for too long.
        """
        if request.verify_only:
            yield from self._verify(request)
            return
        with self._load_lock:  # a load whose caller has gone ends first
            yield from self._load(request)

    def _verify(self, request: pb.LoadRequest) -> Iterator[pb.LoadReply]:
        """Reads files, and compares them with what their manifests say."""
        folder, size = Folder(request.url), 0
        for slots in request.slots:
            decode(_read(folder, slots.file), slots.file.file)
            size += slots.file.bytes
            yield pb.LoadReply(bytes=size)
        parts = [(table, part) for table in request.tables for part in table.parts]
        with ThreadPoolExecutor(_LOADERS) as readers:
            reading = deque[Future[Any]]()
            try:
                for table, part in parts:
                    reading.append(readers.submit(_read_part, folder, part, table, request.cluster_id))
                    if len(reading) > _LOADERS:
                        reading.popleft().result()
                        yield pb.LoadReply(bytes=size)
                for each in reading:
                    each.result()
            finally:
                readers.shutdown(cancel_futures=True)
        yield pb.LoadReply(bytes=size + sum(part.file.bytes for _, part in parts))

    def _load(self, request: pb.LoadRequest) -> Iterator[pb.LoadReply]:
        engine, folder = self._engine, Folder(request.url)
        engine.refuse(
            pb.Refusal(
                code=Unavailable.number,
                message=f"shard {engine.shard} is loading rows of a checkpoint",
                table_ids=sorted({*engine.refused_tables, *(table.schema.id for table in request.tables)}),
            )
        )
        if request.HasField("route"):
            engine.note_owned(request.route)
        engine.store.set_lineage(request.lineage)
        rows = size = 0
        newest: list[dict[str, Tensor]] = []  # slots' files of the checkpoint itself, not of those it adds to
        versions = np.zeros(engine.slot_count, np.uint64)
        whole_since = np.zeros(engine.slot_count, np.uint32)  # what checkpoints before this one say of a slot is over
        for slots in request.slots:
            _, tensors = decode(_read(folder, slots.file), slots.file.file)
            at = tensors["slot"].values
            versions[at] = tensors["version"].values
            whole_since[at[tensors["whole"].values]] = slots.index
            size += slots.file.bytes
            if slots.index == max(each.index for each in request.slots):
                newest.append(tensors)
        for table in request.tables:
            engine.remake_table(schema_of_message(table.schema))
        self._load_filters(request, newest)
        with ThreadPoolExecutor(_LOADERS) as loaders:
            for table in request.tables:
                # Files of one checkpoint have different rows; those of the next one in the chain come after them.
                for _, group in itertools.groupby(table.parts, lambda part: part.index):
                    parts = list(group)
                    waiting = [
                        (
                            part,
                            loaders.submit(
                                self._load_part,
                                folder,
                                parts[at : at + _LOADERS + 1 : _LOADERS],
                                table,
                                request,
                                whole_since,
                            ),
                        )
                        for at, part in enumerate(parts)
                    ]
                    for part, loading in waiting:
                        try:
                            loading.result()
                        except BaseException:
                            loaders.shutdown(cancel_futures=True)
                            raise
                        size += part.file.bytes
                        yield pb.LoadReply(rows=rows, bytes=size)
        owned = np.flatnonzero(engine.owned_slots).astype(np.uint32)
        engine.store.set_sequences(owned, versions[owned] & _SEQUENCE_MASK)
        loaded = {table.schema.id for table in request.tables}
        rows = sum(table.rows for table in engine.table_stats() if table.table_id in loaded)
        if request.windows_json:
            engine.install_jobs(json.loads(request.windows_json))
        yield pb.LoadReply(rows=rows, bytes=size)

    def _load_filters(self, request: pb.LoadRequest, slots_files: list[dict[str, Tensor]]) -> None:
        """Of tables that still have their id, which the filters' hashes are made with, and a policy that counts."""
        engine = self._engine
        for table in request.tables:
            policy = schema_of_message(table.schema).policy
            most = -(-policy.admit_capacity // engine.slot_count)  # keys of a slot
            if table.saved_table_id != table.schema.id or policy.admit_after <= 1:
                continue
            for tensors in slots_files:
                if f"filter.{table.schema.id}.slot" not in tensors:
                    continue
                which, ends, image = (tensors[f"filter.{table.schema.id}.{part}"].values for part in _FILTER_PARTS)
                for slot, cells in zip(which.tolist(), np.split(image, ends[:-1]), strict=True):
                    if engine.owned_slots[slot] and len(cells) - 1 <= max(1, most):  # else it counts anew
                        engine.store.load_filter(table.schema.id, slot, np.ascontiguousarray(cells))

    def _load_part(
        self,
        folder: Folder,
        parts: list[pb.ChainFile],
        table: pb.LoadTable,
        request: pb.LoadRequest,
        whole_since: NDArray[np.uint32],
    ) -> None:
        """Loads the first of these files; the disk reads the others too, which loaders take next."""
        engine, part = self._engine, parts[0]
        for each in parts:
            folder.read_ahead(each.file.file)
        rows = _read_part(folder, part, table, request.cluster_id)
        slots = _server.slots_of(table.schema.id, rows.keys, engine.slot_count)
        saved_slots = slots
        if table.saved_table_id != table.schema.id:
            saved_slots = _server.slots_of(table.saved_table_id, rows.keys, engine.slot_count)
        mine = engine.owned_slots[slots] & (whole_since[saved_slots] <= part.index)
        if not mine.all():
            rows = rows.take(mine)
        versions = rows.versions
        if table.saved_table_id != table.schema.id:  # other slots, whose sequences begin anew
            versions = np.full(len(rows.keys), request.lineage << 48, np.uint64)
        count = len(rows.keys)
        budget = engine.store.memory_budget_bytes or _BATCH_BYTES * 128
        batch_bytes = min(_BATCH_BYTES, max(_LEAST_BATCH_BYTES, budget // 128))
        per_batch = max(1, batch_bytes * count // max(1, rows.weights.nbytes + rows.state.nbytes))
        for begin in range(0, count, per_batch):  # a batch must have room in memory at once
            batch = slice(begin, begin + per_batch)
            state = np.empty((0,), np.float32) if table.without_state else rows.state[batch]
            engine.store.install(
                table.schema.id,
                rows.keys[batch],
                versions[batch],
                rows.update_counts[batch],
                rows.weights[batch],
                state,
                rows.age_steps[batch],
                rows.push_seconds[batch],
            )


def _filters(snapshot: _server.Snapshot, slots: NDArray[np.uint32]) -> dict[str, Tensor]:
    """What each table's filters counted at the cut: which slots counted anything, where the image of each ends, and the
    images, one after another.
    """
    tensors: dict[str, Tensor] = {}
    for schema in snapshot.tables:
        images = {slot: image for slot in slots.tolist() if len(image := snapshot.filter_image(schema.id, slot))}
        if images:
            values = (
                Tensor("U32", np.fromiter(images, np.uint32)),
                Tensor("U64", np.cumsum([len(image) for image in images.values()], dtype=np.uint64)),
                Tensor("U64", np.concatenate(list(images.values()))),
            )
            tensors |= {
                f"filter.{schema.id}.{part}": tensor for part, tensor in zip(_FILTER_PARTS, values, strict=True)
            }
    return tensors


def _write_part(folder: Folder, name: str, facts: PartFacts, rows: Rows) -> pb.DumpReply:
    part = pb.DumpedPart(
        file=_write(folder, name, encode_rows(facts, rows)),
        table_id=facts.table_id,
        first_slot=facts.first_slot,
        end_slot=facts.end_slot,
        rows=len(rows.keys),
    )
    return pb.DumpReply(part=part)


def _write(folder: Folder, name: str, encoded: Encoded) -> pb.WrittenFile:
    folder.write(name, encoded.pieces)
    return pb.WrittenFile(file=name, bytes=encoded.size, xxh3=encoded.xxh3)


def _read_part(folder: Folder, part: pb.ChainFile, table: pb.LoadTable, cluster_id: int) -> Rows:
    """The rows of a file, which is what its manifest says."""
    where = f"{folder.url}/{part.file.file}"
    facts, rows = decode_rows(_read(folder, part.file), where, is_checked=True)
    if (facts.cluster_id, facts.table_id) != (cluster_id, table.saved_table_id):
        raise DataLoss(
            f"{where}: has rows of {facts.table} of cluster {facts.cluster_id:x}; the manifest means a table of "
            f"cluster {cluster_id:x}"
        )
    return rows


def _read(folder: Folder, file: pb.WrittenFile) -> memoryview:
    return check_file(folder, FileFacts(file.file, file.bytes, file.xxh3))


def give_way() -> None:
    """Lets other threads of this machine go first; for threads that nobody waits for."""
    thread = threading.get_native_id()
    with suppress(OSError):  # a wish
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICE))


async def in_thread(items: Callable[[], Iterator[Item]], *, gives_way: bool = False) -> AsyncIterator[Item]:
    """What an iterator gives, made in a thread of its own, one at a time; left early, the iterator is closed.

    Args:
        items: makes the iterator.
        gives_way: the thread has a lower priority.
    """
    iterator, done = items(), object()

    def take() -> Any:
        return next(iterator, done)

    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(1, "sparserow-rows", give_way if gives_way else None)
    try:
        while (item := await loop.run_in_executor(thread, take)) is not done:
            yield item
    finally:
        close = getattr(iterator, "close", None)
        if close is not None:
            await asyncio.shield(loop.run_in_executor(thread, close))
        thread.shutdown(wait=False)
