"""The serving processes of the other shards: any process then answers for every key, as a load balancer needs it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..proto.errors import NotFound, SparserowError, Unavailable, error_of
from ..proto.published.registry import Alias
from ..proto.schema import TableSchema
from .client.replica_pool import Asked, ReplicaPool, ReplicaPoolOptions

_RETRY_SEC = 0.2  # between tries to find the peers
_REFRESH_SEC = 0.25  # between looks at what they serve


@dataclass(frozen=True)
class FoundRows:
    """Rows of one table: rows (n, dim) float32, versions (n), found (n), and answered (n): False where the key belongs
    to another shard that did not answer.
    """

    table: str
    rows: NDArray[np.float32]
    versions: NDArray[np.uint64]
    found: NDArray[np.bool_]
    answered: NDArray[np.bool_]


class Peers:
    """A thread finds them, since processes of a pool start in any order; until then no lookup waits for them.
    Thread-safe.

    Args:
        addresses: ``HOST:PORT`` of gRPC of the processes of all shards; this process may be among them.
    """

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self._options = ReplicaPoolOptions(addresses, connections=4, hedge_ms=20.0, refresh_sec=_REFRESH_SEC)
        self._lock = threading.Lock()
        self._pool: ReplicaPool | None = None
        self._problem = "are being looked for"
        self._in_use: dict[tuple[str, str], int] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._find, name="sparserow-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the connections."""
        self._closed.set()
        self._thread.join(self._options.deadline_sec + 1)
        if self._pool is not None:
            self._pool.close()

    @property
    def problem(self) -> str:
        """Why they are not known yet; empty from the moment that they are."""
        with self._lock:
            return "" if self._pool is not None else f"--peers: {self._problem}"

    def alias(self, model: str, which: str) -> Alias | None:
        """What ``model@which`` names as far as every process of the pool has it; None when that is not known."""
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
        """Fills in rows that are not answered, of the version with this handle.

        Args:
            handle: of ``MODEL@VERSION``.
            schemas, keys: of each table.
            found: of each table; completed.
            deadline: monotonic seconds.

        Returns:
            Why some are still missing; empty when none is.
        """
        try:
            pool = self._found()
            missing = [np.flatnonzero(~part.answered) for part in found]
            asked = [
                (schema.id, schema.version, schema.dim, np.ascontiguousarray(all_keys[places]))
                for schema, all_keys, places in zip(schemas, keys, missing, strict=True)
            ]
            parts, answers = pool.ask(Asked(handle, asked, deadline))
        except SparserowError as error:
            return (str(error),)
        for part, places, (rows, versions, is_found, answered) in zip(found, missing, parts, strict=True):
            part.rows[places], part.versions[places] = rows, versions
            part.found[places], part.answered[places] = is_found, answered
        problems = []
        for shard, answer in enumerate(answers):
            if answer is not None and answer[1] == NotFound.number:
                problems.append(f"serving shard {shard}: has not loaded this version yet")
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
