"""The shard's part of a save: it writes the rows of a cut to files (loads.py reads them)."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ...cpp_ext import _server
from ...proto import control_pb2 as pb
from ...proto.checkpoint.folder import Folder
from ...proto.checkpoint.manifest import FileFacts, check_file
from ...proto.checkpoint.row_parts import PartFacts, Rows, encode_rows
from ...proto.checkpoint.tensor_file import Encoded, Tensor, decode, encode
from ...proto.checkpoint.urls import check_url
from ...proto.errors import NotFound
from ...proto.schema import Dtype
from .engine import ShardEngine
from .loads import FILTER_PARTS

log = logging.getLogger(__name__)

# A cut whose dump is not requested in time is released, so that writes stop preserving images for it.
_UNCLAIMED_SEC = 60.0
_ENDED_KNOWN = 64  # number of ended saves that are remembered, so that a late cut for them is refused
_SHARED_SHARE = 4  # a part smaller than 1/4 of a file's bytes shares a file with others
_MOST_SHARED = 1024  # tables in a file, whose header has an entry for each tensor
_NICE = 10  # added to the nice value of threads that write rows, so that serving has priority

Item = TypeVar("Item")


class ShardCheckpoints:
    """The cuts and dumps of one shard.

    The snapshot of a cut belongs to one save. It ends with its dump, or when another save makes its cut. A coordinator
    makes one save at a time, so the former save requests nothing more.

    Args:
        engine: the engine with the rows.
    """

    def __init__(self, engine: ShardEngine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._cuts: dict[str, tuple[_server.Snapshot, threading.Timer]] = {}  # by id of the save; guarded by _lock
        self._ended: dict[str, None] = {}  # the last ended saves, oldest first; guarded by _lock

    def cut(self, request: pb.CutRequest) -> pb.CutReply:
        """Preserves the rows of one instant for :meth:`dump`.

        Raises:
            SparserowError: as for :meth:`ShardEngine.cut`.
        """
        since = self._since(request)
        with self._lock:
            left = list(self._cuts)
        for save in left:
            log.info("the cut of save %s was never dumped; it is released", save)
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
        """Returns the slot versions in the base checkpoint, (slot_count) uint64; None when all rows are saved.

        The version is 0 where the base has no rows of a slot.
        """
        if not request.base_url:
            return None
        since, folder = np.zeros(self._engine.slot_count, np.uint64), Folder(check_url("base_url", request.base_url))
        for slots in request.base_slots:
            if not self._engine.owned_slots[slots.first_slot : slots.end_slot].any():
                continue
            _, tensors = decode(_read(folder, slots.file), slots.file.file)
            since[tensors["slot"].values] = tensors["version"].values
        return since

    def end(self, save: str) -> None:
        """Releases a cut that is not being dumped; the call is harmless when there is none."""
        snapshot = self._take(save)
        if snapshot is not None:
            snapshot.end()

    def _take(self, save: str) -> _server.Snapshot | None:
        """Returns and removes the snapshot of a save, which can have no cut from now on."""
        with self._lock:
            self._ended[save] = None
            for old in list(self._ended)[:-_ENDED_KNOWN]:
                del self._ended[old]
            snapshot, unclaimed = self._cuts.pop(save, (None, None))
        if unclaimed is not None:
            unclaimed.cancel()
        return snapshot

    def dump(self, request: pb.DumpRequest) -> Iterator[pb.DumpReply]:
        """Writes the rows of a cut, one file at a time, and yields a reply once a file is on the disk.

        Raises:
            NotFound: there is no such cut.
            SparserowError: a file cannot be written, or the cut was given up.
        """
        snapshot = self._take(request.save)
        if snapshot is None:
            raise NotFound(f"shard {self._engine.shard}: there is no cut for save {request.save}")
        try:
            folder = Folder(check_url("url", request.url))
            part_bytes = snapshot.page_bytes(request.part_bytes)
            yield from self._dump_rows(snapshot, folder, part_bytes)
            yield pb.DumpReply(slots=_write(folder, f"slots.{self._engine.shard}.safetensors", self._slots(snapshot)))
            yield pb.DumpReply(stats=pb.DumpStats(**snapshot.stats()))
        finally:
            snapshot.end()

    def _dump_rows(self, snapshot: _server.Snapshot, folder: Folder, part_bytes: int) -> Iterator[pb.DumpReply]:
        """Writes one file while the rows of the next are read."""
        pace = snapshot.pace()
        with ThreadPoolExecutor(1, "sparserow-write", give_way) as writer:
            writing: Future[pb.DumpReply] | None = None
            for number, parts in enumerate(self._files(snapshot, part_bytes)):
                if writing is not None:
                    yield writing.result()
                name = f"rows.{self._engine.shard}.{number}.safetensors"
                writing = writer.submit(_write_rows, folder, name, parts, pace)
            if writing is not None:
                yield writing.result()

    def _files(self, snapshot: _server.Snapshot, part_bytes: int) -> Iterator[list[tuple[PartFacts, Rows]]]:
        """Yields the parts of each file. Small parts share a file, so that a small table needs no file of its own."""
        shared: list[tuple[PartFacts, Rows]] = []
        size, most = 0, part_bytes // _SHARED_SHARE
        for schema in snapshot.tables:
            for facts, rows in self._parts(snapshot, schema, part_bytes):
                if rows.size >= most:
                    yield [(facts, rows)]
                    continue
                if any(facts.table_id == other.table_id for other, _ in shared[-1:]) or len(shared) == _MOST_SHARED:
                    yield shared  # a file has each table at most once
                    shared, size = [], 0
                shared.append((facts, rows.copy()))  # copied, so that the memory of a page is released at once
                size += rows.size
                if size >= most:
                    yield shared
                    shared, size = [], 0
        if shared:
            yield shared

    def _parts(
        self, snapshot: _server.Snapshot, schema: _server.TableSchema, part_bytes: int
    ) -> Iterator[tuple[PartFacts, Rows]]:
        """Yields the parts of a table.

        Rows that changed since the cut come before their slots' turn, so that they leave the side buffer as fast as
        possible.
        """
        engine, done = self._engine, 0
        while done < engine.slot_count:
            page = snapshot.next_images(schema.id, max_bytes=part_bytes)
            if not len(page[0]):
                page = snapshot.next(schema.id, max_bytes=part_bytes)
                done = page[8]
            rows = Rows(*page[:7])
            if not len(rows.keys):
                continue
            slots = _server.slots_of(schema.id, rows.keys, engine.slot_count)
            facts = PartFacts(
                engine.cluster_id,
                schema.name,
                schema.id,
                cast(Dtype, schema.dtype),
                engine.slot_count,
                first_slot=int(slots.min()),
                end_slot=int(slots.max()) + 1,
            )
            yield facts, rows

    def _slots(self, snapshot: _server.Snapshot) -> Encoded:
        owned = np.flatnonzero(self._engine.owned_slots).astype(np.uint32)
        tensors = {
            "slot": Tensor("U32", owned),
            "version": Tensor("U64", snapshot.slot_versions[owned]),
            "whole": Tensor("BOOL", snapshot.whole_slots[owned]),
            **_filters(snapshot, owned),
        }
        return encode(tensors, {"sparserow.cluster": f"{self._engine.cluster_id:x}"})


def _filters(snapshot: _server.Snapshot, slots: NDArray[np.uint32]) -> dict[str, Tensor]:
    """Returns the admission counts of each table at the cut, as tensors.

    The tensors of a table are the slots that counted a key, the end of each slot's image, and the images one after
    another.
    """
    tensors: dict[str, Tensor] = {}
    for schema in snapshot.tables:
        if not schema.has_filter:
            continue
        images = {slot: image for slot in slots.tolist() if len(image := snapshot.filter_image(schema.id, slot))}
        if images:
            values = (
                Tensor("U32", np.fromiter(images, np.uint32)),
                Tensor("U64", np.cumsum([len(image) for image in images.values()], dtype=np.uint64)),
                Tensor("U64", np.concatenate(list(images.values()))),
            )
            tensors |= {f"filter.{schema.id}.{part}": tensor for part, tensor in zip(FILTER_PARTS, values, strict=True)}
    return tensors


def _write_rows(folder: Folder, name: str, parts: list[tuple[PartFacts, Rows]], pace: _server.SavePace) -> pb.DumpReply:
    written = pb.DumpedFile(file=_write(folder, name, encode_rows(parts, pace), pace))
    for facts, rows in parts:
        written.parts.add(
            table_id=facts.table_id, first_slot=facts.first_slot, end_slot=facts.end_slot, rows=len(rows.keys)
        )
    return pb.DumpReply(rows=written)


def _write(folder: Folder, name: str, encoded: Encoded, pace: _server.SavePace | None = None) -> pb.WrittenFile:
    xxh3 = folder.write(name, encoded.pieces, pace)
    return pb.WrittenFile(file=name, bytes=encoded.size, xxh3=xxh3)


def _read(folder: Folder, file: pb.WrittenFile) -> memoryview:
    return check_file(folder, FileFacts(file.file, file.bytes, file.xxh3))


def give_way() -> None:
    """Lowers the priority of this thread, which does background work."""
    _server.step_back(_NICE)


async def in_thread(items: Callable[[], Iterator[Item]], *, gives_way: bool = False) -> AsyncIterator[Item]:
    """Yields the items of an iterator that runs in a thread of its own; closes the iterator when the reader stops
    early.

    Args:
        items: makes the iterator.
        gives_way: whether the thread has a lower priority.
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
