"""Asks the serving processes of other shards, so that every process answers for all keys, as a load balancer needs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..proto.errors import NotFound, SparserowError, Unavailable, error_of
from ..proto.published.registry import Alias
from ..proto.schema import TableSchema
from .client.replica_pool import ReplicaPool, ReplicaPoolOptions, ReplicaRequest

_RETRY_SEC = 0.2  # the pause between two tries to find the peers
_REFRESH_SEC = 0.25  # the pause between two requests for what they serve


@dataclass(frozen=True)
class FoundRows:
    """The result of a lookup in one table.

    Attributes:
        table: the name of the table.
        rows: the rows, (n, dim) float32.
        versions: the versions of the rows in training, (n) uint64.
        found: whether each row exists, (n) bool.
        answered: whether each key was answered, (n) bool; False when its shard did not answer.
    """

    table: str
    rows: NDArray[np.float32]
    versions: NDArray[np.uint64]
    found: NDArray[np.bool_]
    answered: NDArray[np.bool_]


class Peers:
    """The serving processes of the other shards. Thread-safe.

    A thread looks for them, since processes of a pool start in any order. Until they are found, no lookup waits for
    them.

    Args:
        addresses: the gRPC addresses, ``HOST:PORT``, of the processes of all shards; that of this process may be among
            them.
    """

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self._options = ReplicaPoolOptions(addresses, connections=4, hedge_ms=20.0, refresh_sec=_REFRESH_SEC)
        self._lock = threading.Lock()
        self._pool: ReplicaPool | None = None
        self._problem = "the peers are being looked for"
        self._in_use: dict[tuple[str, str], int] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._find, name="sparserow-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Closes the connections."""
        self._closed.set()
        self._thread.join(self._options.deadline_sec + 1)
        if self._pool is not None:
            self._pool.close()

    @property
    def problem(self) -> str:
        """The reason why the peers were not found yet; "" as soon as they are found."""
        with self._lock:
            return "" if self._pool is not None else f"--peers: {self._problem}"

    def alias(self, model: str, which: str) -> Alias | None:
        """Returns the version that ``model@which`` names and that every process of the pool has; None: not known."""
        with self._lock:
            if self._pool is None:
                return None
            try:
                version, canary, share = self._pool.view.alias(model, which, self._in_use.get((model, which)))
            except NotFound:
                return None
            self._in_use[model, which] = version
        return Alias(version, canary or None, share)

    def complete(
        self,
        handle: int,
        schemas: Sequence[TableSchema],
        keys: Sequence[NDArray[np.uint64]],
        found: list[FoundRows],
        deadline: float,
    ) -> tuple[str, ...]:
        """Asks the peers for the rows that this process has not answered, and fills them in.

        Args:
            handle: the handle of ``MODEL@VERSION``.
            schemas: the schema of each table.
            keys: the keys of each table, (n) uint64.
            found: the result of each table so far, which is completed in place.
            deadline: the deadline, in monotonic seconds.

        Returns:
            The reasons why rows are still missing; () when none is missing.
        """
        try:
            pool = self._found()
            missing = [np.flatnonzero(~part.answered) for part in found]
            asked = [
                (schema.id, schema.version, schema.dim, np.ascontiguousarray(all_keys[places]))
                for schema, all_keys, places in zip(schemas, keys, missing, strict=True)
            ]
            parts, answers = pool.ask(ReplicaRequest(handle, asked, deadline))
        except SparserowError as error:
            return (str(error),)
        for part, places, (rows, versions, is_found, answered) in zip(found, missing, parts, strict=True):
            part.rows[places], part.versions[places] = rows, versions
            part.found[places], part.answered[places] = is_found, answered
        problems = []
        for shard, answer in enumerate(answers):
            if answer is not None and answer[1] == NotFound.number:
                problems.append(f"serving shard {shard} has not loaded this version yet")
            elif answer is not None and answer[1]:
                problems.append(f"serving shard {shard}: {error_of(answer[1], answer[2])}")
        return tuple(problems)

    def _found(self) -> ReplicaPool:
        with self._lock:
            if self._pool is None:
                raise Unavailable(f"--peers: {self._problem}")
            return self._pool

    def _find(self) -> None:
        while not self._closed.is_set():
            try:
                pool = ReplicaPool(self._options)
            except SparserowError as error:
                with self._lock:
                    self._problem = str(error)
                self._closed.wait(_RETRY_SEC)
                continue
            with self._lock:
                self._pool = pool
            return
