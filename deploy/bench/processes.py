"""The processes that the network benchmarks talk to: a shard, and raw TCP as the reference."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...proto.security.security import Security
from ...proto.transport import Transport

if TYPE_CHECKING:
    from ...cpp_ext import _client, _server

SLOT_COUNT = 16_384
FRAME_BYTES = 64 + 16 + 40  # bytes of header, section header and table descriptor
ACK_BYTES = 64 + 16 + 24
_START_SEC = 120.0
_HEADER_BYTES = 16  # header of a raw request: its length and the length of the reply, both int64


@dataclass(frozen=True)
class BenchTable:
    """A table with keys 0 to ``rows`` - 1 and Adagrad, which is filled before the benchmark begins."""

    name: str
    dim: int
    rows: int


def bench_client(
    port: int, *, job: int = 1, security: Security | None = None, transport: Transport = "tcp"
) -> _client.Client:
    """Returns a client of a shard process, as worker 0 of a job that the shard has."""
    from ...cpp_ext import _client

    return _client.Client(
        shards=[("127.0.0.1", port)],
        slot_owner=np.zeros(SLOT_COUNT, np.uint16),
        route_epoch=1,
        job_id=job,
        worker_id=0,
        worker_epoch=1,
        transport=transport,
        **(security or Security()).native_client(),
    )


def table_id(table: BenchTable) -> int:
    """Returns the id that the shard process gives the table."""
    from ...cpp_ext import _server

    return _server.id_of_name(table.name)


def filled_store(tables: Sequence[BenchTable]) -> _server.Store:
    """Returns a store of this process that has the rows of ``tables``."""
    from ...cpp_ext import _server

    store = _server.Store(slot_count=SLOT_COUNT)
    for table in tables:
        schema = _server.TableSchema(
            id=_server.id_of_name(table.name),
            name=table.name,
            dim=table.dim,
            optimizer=_server.OptimizerSpec(kind="adagrad"),
        )
        store.create_table(schema)
        for begin in range(0, table.rows, 100_000):
            keys = np.arange(begin, min(begin + 100_000, table.rows), dtype=np.uint64)
            rows = np.full((len(keys), table.dim), 0.01, np.float32)
            store.assign(schema.id, keys, rows)
    return store


def _serve(
    port: Connection, tables: Sequence[BenchTable], io_threads: int, jobs: int, security: Security | None
) -> None:
    from ...cpp_ext import _server

    store = filled_store(tables)
    server = _server.Server(
        store, io_threads=io_threads, local=security is None, **(security or Security()).native_server()
    )
    server.set_route(1, np.zeros(SLOT_COUNT, np.uint16))
    for job in range(1, jobs + 1):
        server.set_job(job, f"bench{job}", None, [(0, 1, 0)])
    port.send(server.port)
    with suppress(EOFError):
        port.recv()  # returns when the benchmark is done
    server.stop()


def _receive(peer: socket.socket, into: memoryview) -> bool:
    """Fills ``into``; returns False when the peer has closed the connection."""
    while into:
        count = peer.recv_into(into)
        if count == 0:
            return False
        into = into[count:]
    return True


def _answer_raw(port: Connection, largest_bytes: int) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    port.send(listener.getsockname()[1])
    peer, _ = listener.accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    header = np.zeros(2, np.int64)
    incoming = memoryview(bytearray(largest_bytes))
    outgoing = memoryview(np.ones(largest_bytes, np.uint8).data)
    while _receive(peer, memoryview(header.data).cast("B")):
        if not _receive(peer, incoming[: int(header[0]) - _HEADER_BYTES]):
            return
        peer.sendall(outgoing[: int(header[1])])


class RawTcp:
    """The reference: requests and replies of given sizes on one connection, one in flight."""

    def __init__(self, port: int, largest_bytes: int) -> None:
        self._peer = socket.create_connection(("127.0.0.1", port))
        self._peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._outgoing: NDArray[np.uint8] = np.ones(largest_bytes, np.uint8)
        self._incoming = memoryview(bytearray(largest_bytes))

    def exchange(self, request_bytes: int, reply_bytes: int) -> None:
        """Sends ``request_bytes`` (at least 16) and receives ``reply_bytes``, with reused buffers."""
        lengths = np.array([request_bytes, reply_bytes], np.int64)
        self._outgoing[:_HEADER_BYTES] = lengths.view(np.uint8)
        self._peer.sendall(self._outgoing[:request_bytes].data)
        if not _receive(self._peer, self._incoming[:reply_bytes]):
            raise ConnectionError("the raw TCP process has ended")


@contextmanager
def spawned(target: object, arguments: tuple[object, ...]) -> Iterator[Connection]:
    """Runs a spawned process, and yields a pipe to it; the process is killed unless it ends soon after the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)  # type: ignore[arg-type]
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(0.5)
        if process.is_alive():
            process.kill()
            process.join()


@contextmanager
def other_process(target: object, arguments: tuple[object, ...]) -> Iterator[int]:
    """Runs a spawned process, which sends its port first and ends when its pipe receives anything; yields the port."""
    with spawned(target, arguments) as process:
        yield int(first_word(process))


def first_word(process: Connection) -> Any:
    """Returns what a spawned process sends first.

    Raises:
        TimeoutError: it sends nothing within two minutes.
    """
    if not process.poll(_START_SEC):
        raise TimeoutError(f"the benchmark's process did not start within {_START_SEC:.0f} s")
    return process.recv()


@contextmanager
def shard_process(
    tables: Sequence[BenchTable], *, io_threads: int = 2, jobs: int = 1, security: Security | None = None
) -> Iterator[int]:
    """Serves ``tables`` from another process, and yields its port.

    Its jobs 1, 2, ... are asynchronous, each with worker 0 of epoch 1.
    """
    with other_process(_serve, (tuple(tables), io_threads, jobs, security)) as port:
        yield port


@contextmanager
def raw_tcp(largest_bytes: int) -> Iterator[RawTcp]:
    """Yields a connection to a process that only receives and sends messages of at most ``largest_bytes``."""
    with other_process(_answer_raw, (largest_bytes,)) as port:
        yield RawTcp(port, largest_bytes)
