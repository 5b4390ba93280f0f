"""A pool of connections to the serving processes of a model, whose addresses are refreshed periodically."""

from __future__ import annotations

import concurrent.futures
import itertools
import random
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...cpp_ext import _client
from ...proto import serving_pb2 as pb
from ...proto.arguments import check_integer, check_number
from ...proto.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    SparserowError,
    not_allowed,
)
from ...proto.security.fresh_security import fresh
from ...proto.security.security import Security
from ...proto.transport import TRANSPORTS, Transport
from .replica_map import ReplicaMap, fetch_view, make_keys

_HEDGE_THREADS = 32
_ASIDE_SEC = 1.0  # how long a replica that did not answer is asked only after the others
_LEAST_SHARE_SEC = 0.002  # the least part of a deadline for one replica; one replica gets all when less is left
# Errors that every replica would answer, since the request or its token is at fault.
_SAME_EVERYWHERE = frozenset((InvalidArgument.number, FailedPrecondition.number, PermissionDenied.number))


@dataclass(frozen=True)
class ReplicaPoolOptions:
    """The options of a pool.

    Args:
        addresses: the gRPC addresses, ``HOST:PORT``, of the processes of all shards and replicas.
        connections: the number of connections to each replica; a connection works on one request at a time.
        hedge_ms: the time, in milliseconds, after which an unanswered request is sent to the next replica as well.
            None: the next replica is asked when the first one has failed, or has not answered within half of the time.
        transport: how rows travel, as for :class:`ServingClient`.
        refresh_sec: the pause between two requests for what is served, in seconds.
        deadline_sec: the deadline of these requests, in seconds.
        security: the certificates and the token, which follow their files; None: the settings of this process.

    Raises:
        InvalidArgument: a value is out of range.
    """

    addresses: tuple[str, ...]
    connections: int = 2
    hedge_ms: float | None = None
    transport: Transport = "auto"
    refresh_sec: float = 1.0
    deadline_sec: float = 5.0
    security: Security | None = None

    def __post_init__(self) -> None:
        check_integer("ServingClient.connections", self.connections, 1)
        check_number("ServingClient.refresh_sec", self.refresh_sec)
        check_number("ServingClient.deadline_sec", self.deadline_sec)
        if self.transport not in TRANSPORTS:
            raise not_allowed("ServingClient.transport", self.transport, TRANSPORTS)
        if self.hedge_ms is not None:
            check_number("ServingClient.hedge_ms", self.hedge_ms, or_zero=True)


def split_addresses(addresses: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the addresses of a text that separates them by commas, or of a sequence.

    Raises:
        InvalidArgument: it is none of both.
    """
    if isinstance(addresses, str):
        return tuple(addresses.split(","))
    if not isinstance(addresses, Iterable):
        raise not_allowed(
            "ServingClient.addresses", addresses, "HOST:PORT, several with commas, or a sequence of such texts"
        )
    return tuple(addresses)


@dataclass(frozen=True)
class ReplicaRequest:
    """A request to a replica.

    Attributes:
        handle: the handle of the version.
        tables: the tables as (id, schema version, dim, keys).
        deadline: the deadline, in monotonic seconds.
    """

    handle: int
    tables: list[tuple[int, int, int, NDArray[np.uint64]]]
    deadline: float


class ReplicaPool:
    """A pool of connections to the serving processes. Thread-safe; ``close`` ends its thread.

    Args:
        options: the processes to reach, and how.

    Raises:
        Unavailable: no process answers for some shard.
    """

    def __init__(self, options: ReplicaPoolOptions) -> None:
        self._options = options
        self.identity = fresh(options.security)
        self._turn = itertools.count(random.randrange(1 << 16))  # clients that start together begin with different ones
        self._aside: dict[int, float] = {}  # by rank of replica: until when it is asked last, in monotonic seconds
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._view = self._fetch()
        self._shown = self.identity.now.native_client()
        self._clients = self._connect(self._view, self._shown)
        self._generation = 0
        self._pool = concurrent.futures.ThreadPoolExecutor(_HEDGE_THREADS, thread_name_prefix="sparserow-lookup")
        self._thread = threading.Thread(target=self._keep_fresh, name="sparserow-serving-view", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Closes the connections when the last call has returned."""
        self._closed.set()
        self._thread.join(self._options.deadline_sec + 1)
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def view(self) -> ReplicaMap:
        """The serving processes and what they serve, as of the last refresh."""
        with self._lock:
            return self._view

    @property
    def generation(self) -> int:
        """A number that rises when the connections are made again, as replicas come or go, or secrets change."""
        with self._lock:
            return self._generation

    def shards(self, handle: int) -> _client.LookupShards:
        """Returns the shards of one replica for a session's ops; each call chooses another replica.

        Args:
            handle: the handle of the version that the ops read.
        """
        with self._lock:
            clients = self._clients
        return clients[self._order(len(clients))[0]][0].shards(handle)

    def refresh(self) -> None:
        """Asks the processes what they serve now, and connects again when processes came or went, or secrets changed.

        Raises:
            Unavailable: no process answers for some shard; the former state stays.
        """
        view = self._fetch()
        shown = self.identity.now.native_client()
        with self._lock:
            moved = view.endpoints != self._view.endpoints or view.route_epoch != self._view.route_epoch
            moved |= shown != self._shown
        clients = self._connect(view, shown) if moved else None
        with self._lock:
            self._view = view
            if clients is not None:
                self._clients, self._aside, self._shown = clients, {}, shown
                self._generation += 1

    def make_keys(self, request: pb.MakeKeysRequest, deadline_sec: float) -> pb.MakeKeysReply:
        """Asks the processes for the keys of values; see :func:`~.replica_map.make_keys`."""
        return make_keys(self._options.addresses, request, deadline_sec=deadline_sec, security=self.identity)

    def ask(self, request: ReplicaRequest) -> tuple[Any, Any]:
        """Sends a request to the replicas, which take turns.

        Returns:
            The first complete answer of a replica, or the best partial one at the deadline: (rows, versions, found,
            answered) for each table, and the answer of each shard.

        Raises:
            DeadlineExceeded: no process answered.
        """
        with self._lock:
            clients = self._clients
        turn = next(self._turn)
        ranks = self._order(len(clients), turn)
        in_order = [(rank, clients[rank][turn // len(clients) % len(clients[rank])]) for rank in ranks]
        if self._options.hedge_ms is None or len(clients) == 1:
            return self._ask_in_turn(in_order, request)
        return self._ask_hedged(in_order, request, self._options.hedge_ms / 1000)

    def _order(self, count: int, turn: int | None = None) -> list[int]:
        """Returns the ranks of replicas in the order to ask: from the one whose turn it is, the failed ones last."""
        first = (next(self._turn) if turn is None else turn) % count
        ranks = [*range(first, count), *range(first)]
        now = time.monotonic()
        with self._lock:
            aside = {rank for rank, until in self._aside.items() if now < until}
        return sorted(ranks, key=lambda rank: rank in aside)

    def _is_aside(self, rank: int) -> bool:
        with self._lock:
            return time.monotonic() < self._aside.get(rank, 0.0)

    def _ask_in_turn(self, clients: list[tuple[int, _client.LookupClient]], request: ReplicaRequest) -> tuple[Any, Any]:
        """Asks one replica after the other.

        A replica gets half of the time that is left if another one has not failed lately, and else all of it.
        """
        best: tuple[Any, Any] | None = None
        for place, (rank, client) in enumerate(clients):
            left = request.deadline - time.monotonic()
            if best is not None and left < _LEAST_SHARE_SEC:
                break
            is_shared = left >= 2 * _LEAST_SHARE_SEC and any(
                not self._is_aside(other) for other, _ in clients[place + 1 :]
            )
            answer = _call(client, replace(request, deadline=request.deadline - left / 2) if is_shared else request)
            best = _better(best, answer)
            codes = {outcome[1] for outcome in answer[1] if outcome is not None} - {0}
            if not codes or codes & _SAME_EVERYWHERE:
                return answer
            if codes != {NotFound.number}:  # a replica that has not loaded the version yet has not failed
                with self._lock:
                    self._aside[rank] = time.monotonic() + _ASIDE_SEC
        assert best is not None
        return best

    def _ask_hedged(
        self, clients: list[tuple[int, _client.LookupClient]], request: ReplicaRequest, hedge_sec: float
    ) -> tuple[Any, Any]:
        running: list[concurrent.futures.Future[Any]] = []
        best: tuple[Any, Any] | None = None
        for place, (_, client) in enumerate(clients):
            running.append(self._pool.submit(_call, client, request))
            is_last = place == len(clients) - 1
            wait_until = request.deadline if is_last else min(request.deadline, time.monotonic() + hedge_sec)
            while running and time.monotonic() < wait_until + (0.5 if is_last else 0.0):
                done, _ = concurrent.futures.wait(
                    running, wait_until - time.monotonic() + 0.01, concurrent.futures.FIRST_COMPLETED
                )
                for future in done:
                    running.remove(future)
                    answer = future.result()
                    if all(outcome is None or outcome[1] == 0 for outcome in answer[1]):
                        return answer  # type: ignore[no-any-return]
                    best = _better(best, answer)
                if done and not running and not is_last:
                    break  # the replica failed early: ask the next one now
                if not done and time.monotonic() >= wait_until:
                    break
        if best is None:
            raise DeadlineExceeded("lookup: no replica answered within the deadline")
        return best

    def _fetch(self) -> ReplicaMap:
        options = self._options
        return fetch_view(options.addresses, deadline_sec=options.deadline_sec, security=self.identity)

    def _connect(self, view: ReplicaMap, shown: dict[str, Any]) -> list[list[_client.LookupClient]]:
        """Returns the connections by rank of replica; a shard with fewer replicas repeats them."""
        most = max(len(replicas) for replicas in view.endpoints)
        return [
            [
                _client.LookupClient(
                    shards=[replicas[rank % len(replicas)] for replicas in view.endpoints],
                    slot_owner=view.slot_owner,
                    route_epoch=view.route_epoch,
                    transport=self._options.transport,
                    **shown,
                )
                for _ in range(self._options.connections)
            ]
            for rank in range(most)
        ]

    def _keep_fresh(self) -> None:
        while not self._closed.wait(self._options.refresh_sec):
            try:
                self.refresh()
            except SparserowError:  # the former state stays; a lookup raises its own error
                continue


def _call(client: _client.LookupClient, request: ReplicaRequest) -> tuple[Any, Any]:
    left_ms = max(1, round((request.deadline - time.monotonic()) * 1000))
    return client.lookup(request.handle, request.tables, deadline_ms=left_ms)


def _better(best: tuple[Any, Any] | None, other: tuple[Any, Any]) -> tuple[Any, Any]:
    """Returns the partial answer with more rows."""
    if best is None:
        return other
    rows = [sum(int(part[3].sum()) for part in answer[0]) for answer in (best, other)]
    return best if rows[0] >= rows[1] else other
