"""The Changes service, through which serving processes follow the rows of this shard."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import grpc
import numpy as np

from ...cpp_ext._server import Store
from ...proto import changes_pb2 as pb, changes_pb2_grpc as pb_grpc, control_pb2 as control
from ...proto.change_replies import METHOD, write_reply
from ...proto.errors import FailedPrecondition, InvalidArgument, not_allowed
from ...proto.process.unary_replies import account_of
from .change_watch import ChangeWatch
from .cursor_owners import CursorOwners
from .engine import ShardEngine

_HELD_SEC = 0.05  # seconds between two looks for rows that a threshold holds back, which become due by time
_GATHER_SEC = 0.002  # after a change, because others of the same commit follow it
_MOST_WAIT_MS = 10_000
_DROPPED_TABLES = 4096  # ids that a cursor may name although the shard has fewer tables
_MOST_IDLE_SEC = 86_400
_MOST_SHOWN = 64  # followers that a status shows
_MOST_PAGE_BYTES = 64 << 20

T = TypeVar("T")


class ChangesService:
    """Answers followers. It belongs to one event loop; reads of rows run in a thread.

    Args:
        engine: returns the engine; raises Unavailable until the coordinator has sent the settings of the cluster.
    """

    def __init__(self, engine: Callable[[], ShardEngine]) -> None:
        self._engine = engine
        self._owners = CursorOwners()
        self._watch: ChangeWatch | None = None
        self._kept_key = secrets.token_bytes(16)  # key of cursors that publishers open and do not read

    async def GetVersions(self, request: pb.GetVersionsRequest, context: Any) -> pb.GetVersionsReply:
        """Returns the version of each slot, and opens a cursor there when the request names one."""
        engine = self._checked(request.cluster_id)
        _check_tables(engine, request.table_ids)
        if request.cursor:  # the cursor keeps changes and has no reader; a publisher may open it again
            idle_sec = _idle_sec(request.idle_sec)
            self._owners.open(
                request.cursor,
                self._kept_key,
                account_of(context),
                idle_sec,
                is_owned=True,
                tables=request.table_ids,
            )
        versions = await asyncio.to_thread(_followed, engine, request.table_ids, engine.store.change_versions)
        if request.cursor:
            await asyncio.to_thread(
                _followed,
                engine,
                request.table_ids,
                partial(
                    engine.store.open_cursor,
                    request.cursor,
                    versions,
                    tables=list(request.table_ids),
                    idle_sec=idle_sec,
                ),
            )
        return pb.GetVersionsReply(versions=versions.tobytes())

    async def OpenCursor(self, request: pb.OpenCursorRequest, context: Any) -> pb.OpenCursorReply:
        """Keeps changes for a follower from now on."""
        engine = self._checked(request.cluster_id)
        if not request.cursor:
            raise InvalidArgument("OpenCursorRequest.cursor: it is empty; allowed: the name of a cursor")
        engine.following = partial(self._following, engine.store)
        _check_tables(engine, request.table_ids)
        versions = _array(request.versions, np.uint64, "versions")
        idle_sec = _idle_sec(request.idle_sec)
        key = self._owners.open(
            request.cursor,
            request.key,
            account_of(context),
            idle_sec,
            is_owned=request.is_owned,
            tables=request.table_ids,
            holds=request.hold_ms > 0,
        )
        opened = partial(
            engine.store.open_cursor,
            request.cursor,
            versions,
            tables=list(request.table_ids),
            idle_sec=idle_sec,
            hold_updates=request.hold_updates,
            hold_move=request.hold_move,
            hold_ms=request.hold_ms,
        )
        try:
            await asyncio.to_thread(_followed, engine, request.table_ids, opened)
        except BaseException:
            self._owners.close(request.cursor, key)
            engine.store.close_cursor(request.cursor)
            raise
        return pb.OpenCursorReply(key=key)

    async def ReadChanges(self, request: pb.ReadChangesRequest, context: Any) -> bytes:
        """Notes acknowledgements and returns the next page, as the bytes of a ReadChangesReply.

        It waits for a change when there is none.
        """
        engine = self._engine()
        store = engine.store
        if not 0 < request.max_bytes <= _MOST_PAGE_BYTES or request.wait_ms > _MOST_WAIT_MS:
            raise InvalidArgument(
                f"ReadChanges: max_bytes {request.max_bytes}, wait_ms {request.wait_ms}; "
                f"allowed: [1, {_MOST_PAGE_BYTES}] and [0, {_MOST_WAIT_MS}]"
            )
        slots = _array(request.acked_slots, np.uint32, "acked_slots")
        acknowledged = self._owners.use(
            request.cursor, request.key, len(slots) + (request.acked_part > 0), _figures(request)
        )
        if len(slots) or request.acked_part:
            versions = _array(request.acked_versions, np.uint64, "acked_versions")
            await asyncio.to_thread(store.ack_changes, request.cursor, slots, versions, request.acked_part)
        tables = self._owners.tables(request.cursor)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.wait_ms / 1000
        holds = self._owners.holds(request.cursor)
        begin = request.begin
        while True:
            watch = self._watched(store)
            changed = watch.armed()
            read = partial(store.read_changes, request.cursor, begin=begin, max_bytes=request.max_bytes)
            page, count, begin, is_last = await asyncio.to_thread(_followed, engine, tables, read)
            left = deadline - loop.time()
            if count or left <= 0:
                fields = pb.ReadChangesReply(slots=count, next_begin=begin, is_last=is_last, acknowledged=acknowledged)
                return write_reply(fields, page if count else b"")
            if not holds:
                await watch.wait(changed, left)
            await asyncio.sleep(min(_HELD_SEC if holds else _GATHER_SEC, max(0.0, deadline - loop.time())))

    def _watched(self, store: Store) -> ChangeWatch:
        if self._watch is None or self._watch.store is not store:
            if self._watch is not None:
                self._watch.close()
            self._watch = ChangeWatch(store)
        return self._watch

    async def CloseCursor(self, request: pb.CloseCursorRequest, context: Any) -> pb.CloseCursorReply:
        """Stops keeping changes for this follower; the call is harmless when the follower is not known."""
        self._owners.close(request.cursor, request.key)
        await asyncio.to_thread(self._engine().store.close_cursor, request.cursor)
        return pb.CloseCursorReply()

    async def GetRow(self, request: pb.GetRowRequest, context: Any) -> pb.GetRowReply:
        """Returns the facts about one row."""
        engine = self._checked(request.cluster_id)
        facts = partial(engine.store.row_facts, request.table_id, request.key)
        return pb.GetRowReply(**await asyncio.to_thread(_followed, engine, [request.table_id], facts))

    def _following(self, store: Store) -> list[control.FollowerLoad]:
        """Returns what the followers say of themselves, for the status; another thread calls it."""
        found = []
        for name, tables, silent_sec, figures in self._owners.following(_MOST_SHOWN):
            schema = next((each for each in map(store.schema, tables) if each is not None), None)
            load = control.FollowerLoad(
                cursor=name,
                namespace="" if schema is None else schema.name.partition("/")[0],
                silent_sec=silent_sec,
                figures=figures,
            )
            found.append(load)
        return found

    def _checked(self, cluster_id: int) -> ShardEngine:
        engine = self._engine()
        if cluster_id != engine.cluster_id:
            raise FailedPrecondition(
                f"cluster id: the follower belongs to {cluster_id:016x}, this shard to {engine.cluster_id:016x}; "
                "follow the cluster that trained the model"
            )
        return engine


class _PagesAsBytes:
    """A stand-in for a gRPC server that registers the handlers of Changes with ReadChanges's reply as raw bytes."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Ignores these handlers, because :meth:`add_registered_method_handlers` receives the same ones by name."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Registers the handlers with the server; generated code calls this once it has made them."""
        name = METHOD.rpartition("/")[2]
        reads = handlers[name]
        handlers[name] = grpc.unary_unary_rpc_method_handler(
            reads.unary_unary, request_deserializer=reads.request_deserializer, response_serializer=None
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        self._server.add_registered_method_handlers(service, handlers)


def add_changes(service: ChangesService, server: Any) -> None:
    """Registers the service with a gRPC server, so that ReadChanges returns its bytes as they are."""
    pb_grpc.add_ChangesServicer_to_server(service, _PagesAsBytes(server))


def _check_tables(engine: ShardEngine, table_ids: Sequence[int]) -> None:
    """Refuses more ids than tables; some may be of tables that were dropped."""
    most = max(_DROPPED_TABLES, len(engine.store.stats()))
    if len(table_ids) > most:
        raise InvalidArgument(f"table_ids: there are {len(table_ids)}; allowed: at most {most}")


def _followed(engine: ShardEngine, tables: Iterable[int], look: Callable[[], T]) -> T:
    """Returns the result of ``look`` on rows of these tables (none: all), if a follower may see them: tables that are
    being loaded are invisible.
    """
    with engine.follow_gate.look(tables):
        return look()


def _figures(request: pb.ReadChangesRequest) -> control.FollowerFigures:
    """Returns what a follower says of itself; numbers that no time can be are left out."""
    figures = control.FollowerFigures()
    figures.CopyFrom(request.figures)
    for name in ("behind_sec", "fresh_p50_sec", "fresh_p99_sec", "goal_sec", "shard_behind_sec"):
        if not getattr(figures, name) >= 0:
            figures.ClearField(name)
    return figures


def _idle_sec(seconds: int) -> int:
    if not 1 <= seconds <= _MOST_IDLE_SEC:
        raise not_allowed("idle_sec", seconds, f"[1, {_MOST_IDLE_SEC}]")
    return seconds


def _array(data: bytes, dtype: type[T], field: str) -> Any:
    if len(data) % np.dtype(dtype).itemsize:
        raise InvalidArgument(f"{field}: {len(data)} bytes are not a whole number of {np.dtype(dtype).name}")
    return np.frombuffer(data, dtype)
