"""One training shard as a follower reads it: pages of changes by a cursor, each acknowledged with the next read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from ..cpp_ext import _server
from ..proto import changes_pb2 as pb, changes_pb2_grpc as pb_grpc, control_pb2 as control
from ..proto.change_replies import METHOD, read_reply
from ..proto.control import ControlClient
from ..proto.errors import FailedPrecondition, Unavailable
from ..proto.grpc_status import CHANNEL_OPTIONS, error_of_status
from ..proto.security.channels import SecureChannel
from .follow_options import FollowOptions
from .loaded_version import LoadedVersion

log = logging.getLogger(__name__)

CALL_DEADLINE_SEC = 20.0
_WAIT_MS = 1000
_PAGE_BYTES = 4 << 20
_IDLE_SEC = 600  # the time after which a shard removes the cursor of a follower that does not come back
_MESSAGE_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.max_receive_message_length", -1))


class AnotherCluster(FailedPrecondition):
    """Raised when the coordinator belongs to another cluster than the one that trained the version."""


@dataclass
class CursorKey:
    """The secret by which a follower proves that a cursor is its own; b"" before the cursor was opened."""

    value: bytes = b""


class ShardStream:
    """An open cursor at one shard; it has to be used in a ``with`` statement.

    Args:
        version: the version whose store gets the pages.
        owned: whether this process owns each slot, (slot_count) bool.
        options: the cluster to follow, and how.
        shard: the number of the shard.
        cursor: the name of the cursor, unique among those of the shard.
        key: the secret of the cursor, b"" before the first stream; the shard's secret is stored in it for the next one.

    Raises:
        Unavailable: the coordinator or the shard cannot be reached.
        AnotherCluster: the cluster is not the one that trained the version.
        SparserowError: the shard refuses the cursor.
    """

    def __init__(
        self,
        version: LoadedVersion,
        owned: NDArray[np.bool_],
        options: FollowOptions,
        shard: int,
        cursor: str,
        key: CursorKey,
    ) -> None:
        self._store = version.store
        self._slots = version.slots
        self._cursor = cursor
        self._key = key
        self._acknowledged = 0
        with ControlClient(options.coordinator) as control:
            view = control.cluster()
            status = control.status()
        check_cluster(version, view.cluster_id)
        control_of = {entry.shard: entry.control for entry in status.shards}
        if shard not in control_of or not control_of[shard].port:
            raise Unavailable(f"shard {shard} has not registered with the coordinator yet")
        address = f"{control_of[shard].host}:{control_of[shard].port}"
        self._peer = f"shard {shard} at {address}"
        self._channel = SecureChannel(address, options=_MESSAGE_OPTIONS)
        self._stub: Any = pb_grpc.ChangesStub(self._channel)
        self._read: Any = self._channel.unary_unary(METHOD, pb.ReadChangesRequest.SerializeToString)
        self._begin = 0
        self._acked: tuple[bytes, bytes, int] = (b"", b"", 0)
        wanted = owned & (view.slot_owner == shard)
        versions = np.where(wanted, version.slots, np.uint64(_server.NOT_FOLLOWED)).astype("<u8")
        threshold = options.threshold
        try:
            opened = self._call(
                self._stub.OpenCursor,
                pb.OpenCursorRequest(
                    cursor=cursor,
                    cluster_id=view.cluster_id,
                    versions=versions.tobytes(),
                    table_ids=[table.schema.id for table in version.tables.values()],
                    idle_sec=_IDLE_SEC,
                    hold_updates=threshold.updates,
                    hold_move=threshold.move,
                    hold_ms=int(threshold.longest_sec * 1000) if threshold.is_on else 0,
                    is_owned=True,
                    key=key.value,
                ),
            )
            key.value = opened.key
        except BaseException:
            self._channel.close()
            raise

    def __enter__(self) -> ShardStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            try:
                self._stub.CloseCursor(pb.CloseCursorRequest(cursor=self._cursor, key=self._key.value), timeout=1.0)
            except grpc.RpcError as error:
                log.info("%s: the cursor was not closed and will expire: %s", self._peer, error.code())
        self._channel.close()

    def turn(self, figures: control.FollowerFigures) -> tuple[dict[str, Any] | None, bool]:
        """Reads a page, applies it, and acknowledges the page before.

        Args:
            figures: what the follower says of itself, for the status of the cluster.

        Returns:
            The counts of the applied page; None when there was no page within a second. And whether the page was the
            last of a round. Then this store has all changes that the shard had when the round began, except rows that
            the threshold keeps back.
        """
        slots, positions, part = self._acked
        data = self._call(
            self._read,
            pb.ReadChangesRequest(
                cursor=self._cursor,
                acked_slots=slots,
                acked_versions=positions,
                acked_part=part,
                begin=self._begin,
                max_bytes=_PAGE_BYTES,
                wait_ms=_WAIT_MS,
                key=self._key.value,
                figures=figures,
            ),
        )
        self._acknowledged += len(slots) // 4 + (part > 0)
        self._acked = (b"", b"", 0)
        reply, page = read_reply(data)
        if self._key.value and reply.acknowledged != self._acknowledged:
            raise FailedPrecondition(
                f"{self._peer}: {reply.acknowledged} positions were acknowledged in the name of this follower, "
                f"{self._acknowledged} of them by itself; it opens its cursor again at the versions that it has"
            )
        self._begin = reply.next_begin
        if not reply.slots:
            return None, reply.is_last
        applied = self._store.apply_changes(page)
        self._slots[applied["slots"]] = applied["versions"]
        self._acked = (
            applied["slots"].astype("<u4").tobytes(),
            applied["positions"].astype("<u8").tobytes(),
            applied["part"],
        )
        return applied, reply.is_last

    def _call(self, method: Callable[..., Any], request: Any) -> Any:
        try:
            return method(request, timeout=CALL_DEADLINE_SEC)
        except grpc.RpcError as error:
            raise error_of_status(error, self._peer) from None


def check_cluster(version: LoadedVersion, cluster_id: int) -> None:
    """Raises AnotherCluster when a cluster is not the one that trained a version."""
    if version.cluster_id != cluster_id:
        raise AnotherCluster(
            f"{version.model}@{version.version} was trained by cluster {version.cluster_id:016x}, "
            f"not by {cluster_id:016x}; follow that one, or publish from this one"
        )
