"""``bench tls``: measures rows over TLS against OpenSSL alone on a socket, and lookups beside strangers at a TLS port.

The reference is C++ with OpenSSL on a blocking socket (``_bench.RawTls``). It moves the same bytes, takes turns with
the measurement, and knows nothing of rows. The same pulls and pushes without TLS stand beside it. Strangers are a
process that opens connections one after another and leaves. A third of them sends random bytes, a third random bytes
that begin as a handshake does, and a third the first message of a real handshake, which the shard computes an answer
to. Some send a byte and wait (slowloris). Since strangers need a CPU themselves, the same strangers at the port of a
process that only accepts and closes stand beside it.
"""

from __future__ import annotations

import random
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...proto.security.security import Security
from ..launch.security_files import init_security
from .harness import MIN_REPETITIONS, Contender, Figure, latency_figure, median, time_in_turns
from .processes import ACK_BYTES, FRAME_BYTES, BenchTable, bench_client, other_process, shard_process, table_id

LIMIT_OF_RAW = 0.8
LIMIT_BESIDE_STRANGERS = 2.0
_STREAM_BYTES = 600
_HANDSHAKE = b"\x16\x03"  # how a TLS record of a handshake begins


@dataclass(frozen=True)
class Size:
    """The amount that is moved, the number of repetitions, and the number of strangers of each of so many turns."""

    table_rows: int = 2_000_000
    keys: int = 50_000
    dim: int = 64
    repetitions: int = 60
    lookups: int = 3_000
    streams: int = 10_000
    waiting: int = 200
    turns: int = 3


FULL = Size()
QUICK = Size(
    table_rows=20_000,
    keys=2_000,
    dim=16,
    repetitions=MIN_REPETITIONS,
    lookups=200,
    streams=300,
    waiting=20,
    turns=1,
)


def run_tls(size: Size) -> Iterator[Figure]:
    """Yields M rows/s of pulls and pushes relative to raw OpenSSL, and p99 of lookups with strangers and without."""
    table = BenchTable("bench/tls", size.dim, size.table_rows)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        security = Security.load(init_security(Path(folder) / "files", ["127.0.0.1"], valid_sec=86_400))
        port = stack.enter_context(shard_process([table], security=security))
        client = bench_client(port, security=security)
        yield from _moved(size, table, client, security)
        yield from _beside_strangers(size, table, client, port)


def _moved(size: Size, table: BenchTable, client: Any, security: Security) -> Iterator[Figure]:
    key_bytes, row_bytes = 8 * size.keys, 4 * size.dim * size.keys
    grads = np.full((size.keys, size.dim), 0.01, np.float32)
    keys = np.random.default_rng(7)

    def fresh_keys() -> NDArray[np.int64]:
        return keys.choice(size.table_rows, size.keys, replace=False).astype(np.int64)

    with (
        shard_process([table]) as plain_port,
        _raw_tls(key_bytes + row_bytes + 4096, security) as raw,
    ):
        clients = {"tls": client, "plain": bench_client(plain_port)}
        sequences = dict.fromkeys(clients, 0)

        def pull(which: str) -> Contender:
            return Contender(which, fresh_keys, lambda ids: clients[which].pull(table_id(table), ids, dim=size.dim))

        def push(which: str) -> Contender:
            def run(ids: NDArray[np.int64]) -> None:
                sequences[which] += 1
                clients[which].push(table_id(table), ids, grads, dim=size.dim, lr=0.01, sequence=sequences[which])

            return Contender(which, fresh_keys, run)

        for what, make, there, back in (
            ("pull", pull, FRAME_BYTES + key_bytes, FRAME_BYTES + row_bytes),
            ("push", push, FRAME_BYTES + key_bytes + row_bytes, ACK_BYTES),
        ):

            def exchange(_: object, there: int = there, back: int = back) -> None:
                raw.exchange(there, back)

            contenders = [make("tls"), make("plain"), Contender("raw OpenSSL", lambda: None, exchange)]
            tls, plain, reference = (
                size.keys / median(seconds) / 1e6 for seconds in time_in_turns(contenders, repetitions=size.repetitions)
            )
            name, unit = f"tls {what} {size.keys} x {size.dim}", "M rows/s"
            yield Figure(name, tls, unit, limit=LIMIT_OF_RAW, ratio=tls / reference)
            yield Figure(f"{name}: raw OpenSSL, same bytes", reference, unit)
            yield Figure(f"{name}: of plain TCP", tls, unit, ratio=tls / plain)


def _beside_strangers(size: Size, table: BenchTable, client: Any, port: int) -> Iterator[Figure]:
    keys = np.random.default_rng(8)

    def lookups() -> list[float]:
        seconds = []
        for _ in range(size.lookups):
            ids = keys.integers(0, size.table_rows, 100)
            begin = time.perf_counter()
            client.pull(table_id(table), ids, dim=size.dim)
            seconds.append(time.perf_counter() - begin)
        return seconds

    def beside(strangers_port: int) -> list[float]:
        seconds: list[float] = []
        with other_process(_come_as_strangers, (strangers_port, size.streams, size.waiting)) as ended_port:
            # Each connection to the port shows whether strangers are still active: it listens once all have connected.
            while not seconds or not _is_open(ended_port):
                seconds += lookups()
        return seconds

    lookups()  # warm-up
    at_shard, elsewhere, alone = [], [], []
    with other_process(_accept_and_close, ()) as other_port:
        for _ in range(size.turns):
            alone += lookups()
            at_shard += beside(port)
            elsewhere += beside(other_port)
    quiet, crowded, busy = (float(np.percentile(seconds, 99)) for seconds in (alone, at_shard, elsewhere))
    name = f"lookup 100 x {size.dim} beside {size.streams} strangers and {size.waiting} that wait"
    yield latency_figure(f"{name}: p99", crowded, LIMIT_BESIDE_STRANGERS, crowded / quiet)
    yield latency_figure(f"{name}, at another process: p99", busy, ratio=busy / quiet)
    yield latency_figure("lookup without strangers: p99", quiet)


def _is_open(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def _come_as_strangers(pipe: Connection, port: int, streams: int, waiting: int) -> None:
    """Connects as strangers do; listens on a port once all streams were sent."""
    ended = socket.socket()
    ended.bind(("127.0.0.1", 0))
    pipe.send(ended.getsockname()[1])
    chance = random.Random(11)
    slow: list[socket.socket] = []
    hello = _client_hello()
    for number in range(streams):
        noise = chance.randbytes(chance.randint(1, _STREAM_BYTES))
        if number % 3 == 0:
            noise = _HANDSHAKE + noise
        elif number % 3 == 1:
            noise = hello
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as peer:
            peer.sendall(noise)
        if len(slow) < waiting:
            slow.append(socket.create_connection(("127.0.0.1", port), timeout=5))
            slow[-1].sendall(_HANDSHAKE[:1])
    ended.listen()
    with suppress(EOFError):
        pipe.recv()  # returns when the benchmark is done


def _client_hello() -> bytes:
    """Returns the first message of a handshake."""
    sent = ssl.MemoryBIO()
    context = ssl.create_default_context()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="shard").do_handshake()
    return sent.read()


def _accept_and_close(pipe: Connection) -> None:
    """Accepts whoever comes, and closes; ends with its pipe."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    pipe.send(listener.getsockname()[1])

    def accept() -> None:
        while True:
            peer, _ = listener.accept()
            peer.close()

    threading.Thread(target=accept, daemon=True).start()
    with suppress(EOFError):
        pipe.recv()  # returns when the benchmark is done


@contextmanager
def _raw_tls(largest_bytes: int, security: Security) -> Iterator[Any]:
    from ...cpp_ext import _bench

    with (
        other_process(_answer_tls, (largest_bytes, security.certificate, security.key)) as port,
        socket.create_connection(("127.0.0.1", port)) as peer,
    ):
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield _bench.RawTls(peer.fileno(), largest_bytes=largest_bytes)


def _answer_tls(pipe: Connection, largest_bytes: int, certificate: str, key: str) -> None:
    from ...cpp_ext import _bench

    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    peer, _ = listener.accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _bench.RawTls(peer.fileno(), certificate=certificate, key=key, largest_bytes=largest_bytes).answer()
