"""``ServingClient``: looks up rows of published models over the data plane."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...cpp_ext import _client, _server
from ...proto import serving_pb2 as pb
from ...proto.arguments import check_integer
from ...proto.closing import Closing
from ...proto.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    SparserowError,
    error_of,
    not_allowed,
)
from ...proto.published.model_names import handle_of, parse_model, routing_hash
from ...proto.row_keys import Keys, as_keys
from ...proto.security.security import Security, loaded_security
from ...proto.transport import Transport
from .replica_map import ReplicaMap, TableShape
from .replica_pool import ReplicaPool, ReplicaPoolOptions, ReplicaRequest, split_addresses

_NOT_FOUND = NotFound.number
_INVALID = (InvalidArgument.number, FailedPrecondition.number, PermissionDenied.number)


@dataclass(frozen=True)
class LookupRows:
    """The rows of a lookup in one table; it unpacks as ``rows, found``.

    Attributes:
        rows: the rows in the order of the keys, (n, dim) float32; zeros for keys that were not answered.
        found: whether each row exists, (n) bool. A row that does not exist has its initial weights.
        versions: the versions of the rows in training, (n) uint64; 0 for rows that do not exist.
        answered: whether each key was answered, (n) bool; False when a shard failed or the deadline passed.
        version: the version of the model that answered.
        errors: the errors of shards that did not answer; () when all answered.
    """

    rows: NDArray[np.float32]
    found: NDArray[np.bool_]
    versions: NDArray[np.uint64]
    answered: NDArray[np.bool_]
    version: int
    errors: tuple[SparserowError, ...] = ()

    @property
    def is_partial(self) -> bool:
        """Whether some keys were not answered."""
        return not bool(self.answered.all())

    def __iter__(self) -> Iterator[Any]:
        return iter((self.rows, self.found))


class ServingClient(Closing):
    """A client of the processes that serve a model. Thread-safe; close it, or use it in a ``with`` statement.

    Args:
        addresses: the gRPC addresses, ``HOST:PORT``, of the serving processes of all shards and replicas: one address,
            several separated by commas, or a sequence.
        model: ``NAME[@ALIAS|@VERSION]``; None: the only model that is served, at the alias ``live``.
        connections: the number of connections to each replica; a connection works on one request at a time.
        hedge_ms: the time, in milliseconds, after which an unanswered request is sent to the next replica as well.
            None: the next replica is asked when the first one has failed, or has not answered within half of the
            deadline. Replicas take turns either way.
        transport: how rows travel. "auto": through shared memory from each process of this host and user, by TCP from
            all others, and with TLS. "tcp": by TCP alone. "shm": through shared memory alone.
        refresh_sec: the pause between two requests for what is served, by a thread, in seconds.
        deadline_sec: the deadline of these requests, in seconds.
        security: the certificates and the token, or the path of their file; None: the settings of this process.

    Attributes:
        model: the name of the model, without its alias or version.

    Raises:
        Unavailable: no process answers for some shard.
        NotFound: the model is not served; the text lists what is.
        InvalidArgument: an address or an argument is not allowed.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        model: str | None = None,
        connections: int = 2,
        hedge_ms: float | None = None,
        transport: Transport = "auto",
        refresh_sec: float = 1.0,
        deadline_sec: float = 5.0,
        security: Security | str | Path | None = None,
    ) -> None:
        options = ReplicaPoolOptions(
            split_addresses(addresses),
            connections=connections,
            hedge_ms=hedge_ms,
            transport=transport,
            refresh_sec=refresh_sec,
            deadline_sec=deadline_sec,
            security=None if security is None else loaded_security(security),
        )
        named = None if model is None else parse_model(model)
        self._lock = threading.Lock()
        self._version: int | None = None
        self._is_closed = False
        self._pool = ReplicaPool(options)
        try:
            self.model, self._which = named or parse_model(_only_model(self._pool.view))
            self._resolve(0)
        except BaseException:
            self._pool.close()
            raise

    def close(self) -> None:
        """Closes the connections when the last call has returned; later calls raise FailedPrecondition."""
        self._is_closed = True
        self._pool.close()

    @property
    def security(self) -> Security:
        """The certificates and the token of this client, or those of this process."""
        return self._pool.identity.now

    @property
    def version(self) -> int:
        """The version of the model that now answers lookups without a routing key."""
        return self._resolve(0)[0]

    def tables(self) -> dict[str, int]:
        """Returns the number of columns of each table of the version in use, by the table's name."""
        return {name: shape.dim for name, shape in self._resolve(0)[1].items()}

    def lookup(self, table: str, keys: Keys, *, deadline_ms: int = 1000, routing_key: str = "") -> LookupRows:
        """Looks up rows of one table.

        Args:
            table: the name of the table.
            keys: the keys, (n): integers in [0, 2**64), or strings, which are hashed as in training. Keys may repeat.
            deadline_ms: the time after which the result is partial, in milliseconds.
            routing_key: names the caller, and so chooses between an alias's version and its canary; "": the version.

        Returns:
            The rows in the order of the keys.

        Raises:
            NotFound: the model has no such table.
            InvalidArgument: the keys are not integers or strings, the deadline is below 1, or the routing key is no
                text.
            DeadlineExceeded, Unavailable: no shard answered.
            FailedPrecondition: the client is closed.
        """
        return self.lookup_many({table: keys}, deadline_ms=deadline_ms, routing_key=routing_key)[table]

    def lookup_many(
        self, tables: Mapping[str, Keys], *, deadline_ms: int = 1000, routing_key: str = ""
    ) -> dict[str, LookupRows]:
        """Looks up rows of several tables in one call, all of one version.

        Args:
            tables: the keys by table; see :meth:`lookup`.
            deadline_ms: see :meth:`lookup`.
            routing_key: see :meth:`lookup`.

        Returns:
            The rows by table.

        Raises:
            NotFound, InvalidArgument, DeadlineExceeded, Unavailable: see :meth:`lookup`.
        """
        check_integer("deadline_ms", deadline_ms, 1)
        if not isinstance(tables, Mapping):
            raise not_allowed("tables: type", type(tables).__name__, "a mapping of keys by the name of a table")
        deadline = time.monotonic() + deadline_ms / 1000
        keys_of = {name: as_keys(keys) for name, keys in tables.items()}
        routing = routing_hash(routing_key)
        for is_last in (False, True):
            version, shapes = self._resolve(routing)
            request = ReplicaRequest(
                handle_of(self.model, version),
                [_table_of(self.model, name, shapes, keys) for name, keys in keys_of.items()],
                deadline,
            )
            parts, answers = self._pool.ask(request)
            given_up = any(answer is not None and answer[1] == _NOT_FOUND for answer in answers)
            if not given_up or is_last:  # a version may just have been unloaded: ask again what is served
                break
            self._pool.refresh()
        errors = tuple(error_of(answer[1], answer[2]) for answer in answers if answer is not None and answer[1])
        if errors and len(errors) == sum(answer is not None for answer in answers):
            raise errors[0]
        refused = next((error for error in errors if error.number in _INVALID), None)
        if refused is not None:
            raise refused
        return {
            name: LookupRows(rows, found, versions, answered, version, errors)
            for name, (rows, versions, found, answered) in zip(keys_of, parts, strict=True)
        }

    def make_keys(
        self, feature: str, values: Sequence[str | int], *, deadline_ms: int = 10_000, routing_key: str = ""
    ) -> NDArray[np.uint64]:
        """Returns the keys that a feature of the version in use makes of values, as in training.

        The rows of another version may have other keys: where an alias may move before they are looked up, use a client
        of one version (``model="NAME@VERSION"``).

        Args:
            feature: the name of a feature that gives keys of one column.
            values: the values, (n): texts and integers; numbers of buckets and times as texts. At most 1,000,000.
            deadline_ms: the time that a process has for the answer, in milliseconds. Its first answer of a version may
                take seconds, since it reads the version's features and imports Arrow then.
            routing_key: see :meth:`lookup`.

        Returns:
            The keys, (n) uint64.

        Raises:
            InvalidArgument: the version has no such feature, or the feature refuses a value.
            FailedPrecondition: the version was published without features, or the client is closed.
            DeadlineExceeded, Unavailable: no process answered.
        """
        check_integer("deadline_ms", deadline_ms, 1)
        version, _ = self._resolve(routing_hash(routing_key))
        request = pb.MakeKeysRequest(
            model=f"{self.model}@{version}", feature=feature, values=[str(value) for value in values]
        )
        return np.array(self._pool.make_keys(request, deadline_ms / 1000).keys, dtype=np.uint64)

    @property
    def generation(self) -> int:
        """A number that rises when processes come or go; earlier results of :meth:`shards` may then be unusable."""
        return self._pool.generation

    def shards(self, version: int | None = None) -> tuple[_client.LookupShards, int, dict[str, TableShape]]:
        """Returns what a session needs to read this model by ops: its shards, the version, and its tables.

        Args:
            version: the number of the version; None: the version in use.

        Raises:
            NotFound: the version is not served.
        """
        found, shapes = self._resolve(0)
        if version is not None:
            shapes = self._pool.view.versions.get(self.model, {}).get(version, {})
            if not shapes:
                raise NotFound(f"model {self.model}@{version} is not served")
            found = version
        return self._pool.shards(handle_of(self.model, found)), found, shapes

    def _resolve(self, routing: int) -> tuple[int, dict[str, TableShape]]:
        if self._is_closed:  # nothing asks the processes any more which version an alias names
            raise FailedPrecondition("ServingClient: the client is closed")
        view = self._pool.view
        with self._lock:
            version, canary, share = view.alias(self.model, self._which, self._version)
            self._version = version
        if canary and routing and _server.routes_to_canary(routing, share):
            version = canary
        return version, view.versions[self.model][version]


class AsyncServingClient:
    """A :class:`ServingClient` for asyncio, whose methods are awaited. Calls run in threads of its own.

    Args:
        client: the client; it is closed together with this object.
        threads: the most lookups at once.
    """

    def __init__(self, client: ServingClient, *, threads: int = 16) -> None:
        check_integer("AsyncServingClient.threads", threads, 1)
        self._client = client
        self._is_closed = False
        self._pool = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="sparserow-async")

    @staticmethod
    async def connect(addresses: str | Sequence[str], **options: Any) -> AsyncServingClient:
        """Makes a client with the arguments and errors of :class:`ServingClient`."""
        return AsyncServingClient(await asyncio.to_thread(lambda: ServingClient(addresses, **options)))

    async def __aenter__(self) -> AsyncServingClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections; later calls raise FailedPrecondition."""
        self._is_closed = True
        await asyncio.to_thread(self._client.close)
        self._pool.shutdown(wait=False)

    async def lookup(self, table: str, keys: Keys, *, deadline_ms: int = 1000, routing_key: str = "") -> LookupRows:
        """Looks up rows of one table; see :meth:`ServingClient.lookup`."""
        found = await self.lookup_many({table: keys}, deadline_ms=deadline_ms, routing_key=routing_key)
        return found[table]

    async def lookup_many(
        self, tables: Mapping[str, Keys], *, deadline_ms: int = 1000, routing_key: str = ""
    ) -> dict[str, LookupRows]:
        """Looks up rows of several tables; see :meth:`ServingClient.lookup_many`."""
        if self._is_closed:
            raise FailedPrecondition("AsyncServingClient: the client is closed")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._pool,
            lambda: self._client.lookup_many(tables, deadline_ms=deadline_ms, routing_key=routing_key),
        )


def _table_of(
    model: str, name: str, shapes: Mapping[str, TableShape], keys: NDArray[np.uint64]
) -> tuple[int, int, int, NDArray[np.uint64]]:
    shape = shapes.get(name)
    if shape is None:
        raise NotFound(f"table {name!r} is not in model {model!r}; its tables: {', '.join(sorted(shapes))}")
    return shape.id, shape.schema_version, shape.dim, keys


def _only_model(view: ReplicaMap) -> str:
    if len(view.versions) != 1:
        known = ", ".join(sorted(view.versions)) or "none"
        raise InvalidArgument(
            f"ServingClient.model: it is missing, and there is not exactly one model; allowed: {known}"
        )
    return next(iter(view.versions))
