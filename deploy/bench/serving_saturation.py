"""Lookups at saturation: the data plane and Redis, each with the settings that were best in short trials.

The settings are the batch, and the number of threads or the depth of pipelining. Keys are drawn, and Redis's requests
written, before the clock runs. Redis's replies have a known length, so they are received and never decoded, which a
client library would have to do; lookups of the data plane arrive as arrays. redis-server belongs to this run.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...cpp_ext import _client
from ...proto.published.model_names import handle_of
from ...proto.transport import Transport
from ...serving.client.client import ServingClient
from ...serving.client.replica_map import fetch_view
from ..launch.local_serving import LocalServing
from . import click_model
from .harness import Figure

TABLE_ID = 77
_REDIS_DEADLINE_SEC = 20.0
_PREPARED = 16  # number of requests of a thread, used in turns

Call = Callable[[Any], object]


@dataclass(frozen=True)
class Size:
    """The amount that is looked up, and the durations."""

    table_rows: int = 1_000_000
    keys: int = 1_000
    dim: int = 64
    loads: int = 5
    repetitions: int = 2_000
    saturation_sec: float = 10.0
    trial_sec: float = 1.5
    batches: tuple[int, ...] = (250, 1_000, 4_000)
    depths: tuple[int, ...] = (1, 4)
    threads: int = 4
    sync_sec: float = 12.0  # seconds of a turn
    sync_turns: int = 3
    train: click_model.Size = click_model.FULL


@dataclass(frozen=True)
class _Way:
    """The settings of a load: keys of a request, threads, and requests in flight on a connection."""

    batch: int
    threads: int
    depth: int = 1

    def __str__(self) -> str:
        depth = f", {self.depth} requests at once" if self.depth > 1 else ""
        return f"{self.batch} keys, {self.threads} threads{depth}"


@dataclass(frozen=True)
class _Contender:
    """A server under load: ``connect`` makes the call of a thread, and ``prepare`` makes its argument from keys."""

    connect: Callable[[_Way], Call]
    prepare: Callable[[Any], Any]


def saturation(
    client: ServingClient, serving: LocalServing, rows: np.ndarray[Any, Any], size: Size
) -> Iterator[Figure]:
    """Returns keys per second with the best settings of each, and p99 of a request of ``size.keys`` keys under full
    load.
    """
    handle = handle_of("bench", client.version)

    def connect(_: _Way) -> Call:
        connection = connection_to(serving, "auto")
        return lambda keys: connection.lookup(handle, [(TABLE_ID, 1, size.dim, keys)], deadline_ms=10_000)

    ours = _Contender(connect, lambda keys: keys)
    ways = [_Way(batch, threads) for batch in size.batches for threads in (size.threads, 2 * size.threads)]
    way = _best(ours, ways, size)
    rate, _ = _load(ours, way, size, size.saturation_sec)
    same = _Way(size.keys, size.threads)
    p99 = float(np.percentile(_load(ours, same, size, size.saturation_sec)[1], 99))
    name = f"lookups of {size.dim} floats at saturation"
    latency = f"lookup p99 under full load ({same})"
    if shutil.which("redis-server") is None:
        yield Figure(f"{name} ({way}); redis-server is not installed", rate / 1e6, "M keys/s")
        yield Figure(latency, p99 * 1e3, "ms", higher_is_better=False)
        return
    with _redis(rows) as port:
        redis = _Contender(lambda way: _RedisReader(port, size.dim * 4, way).read, _mget)
        ways = [_Way(batch, size.threads, depth) for batch in size.batches for depth in size.depths]
        redis_way = _best(redis, ways, size)
        redis_rate, _ = _load(redis, redis_way, size, size.saturation_sec)
        redis_p99 = float(np.percentile(_load(redis, same, size, size.saturation_sec)[1], 99))
    yield Figure(f"{name} ({way})", rate / 1e6, "M keys/s", limit=5.0, ratio=rate / redis_rate)
    yield Figure(f"Redis MGET at saturation ({redis_way})", redis_rate / 1e6, "M keys/s")
    yield Figure(latency, p99 * 1e3, "ms", limit=1.0, ratio=p99 / redis_p99, higher_is_better=False)
    yield Figure(f"Redis MGET p99 under full load ({same})", redis_p99 * 1e3, "ms", higher_is_better=False)


def connection_to(serving: LocalServing, transport: Transport) -> _client.LookupClient:
    """Returns a connection to the data plane."""
    view = fetch_view(serving.addresses, deadline_sec=5.0)
    shards = [replicas[0] for replicas in view.endpoints]
    return _client.LookupClient(
        shards=shards, slot_owner=view.slot_owner, route_epoch=view.route_epoch, transport=transport
    )


def _best(contender: _Contender, ways: Sequence[_Way], size: Size) -> _Way:
    rates = [_load(contender, way, size, size.trial_sec)[0] for way in ways]
    return ways[int(np.argmax(rates))]


def _load(contender: _Contender, way: _Way, size: Size, seconds: float) -> tuple[float, list[float]]:
    """Returns the keys per second of all threads together, and the seconds of each call."""
    all_seconds: list[float] = []
    failures: list[BaseException] = []
    ready = threading.Barrier(way.threads)

    def work(thread: int) -> None:
        try:
            random = np.random.default_rng(thread)
            call = contender.connect(way)
            requests = [
                contender.prepare(random.integers(0, size.table_rows, way.batch).astype(np.uint64))
                for _ in range(_PREPARED)
            ]
            ready.wait(_REDIS_DEADLINE_SEC)
            own: list[float] = []
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                begin = time.perf_counter()
                call(requests[len(own) % _PREPARED])
                own.append(time.perf_counter() - begin)
            all_seconds.extend(own)
        except BaseException as error:  # the caller raises it
            ready.abort()
            failures.append(error)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(way.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return len(all_seconds) * way.batch * way.depth / seconds, all_seconds


class _RedisReader:
    """A connection that reads rows of a known length with MGET and drops them."""

    def __init__(self, port: int, row_bytes: int, way: _Way) -> None:
        self._peer = socket.create_connection(("127.0.0.1", port))
        self._peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._depth = way.depth
        row_reply = len(f"${row_bytes}\r\n") + row_bytes + 2
        self._reply_bytes = way.depth * (len(b"*%d\r\n" % way.batch) + row_reply * way.batch)
        self._into = bytearray(1 << 20)

    def read(self, request: bytes) -> None:
        """Sends the request as often as requests may be in flight, then receives the replies."""
        self._peer.sendall(request * self._depth)
        left = self._reply_bytes
        while left > 0:
            count = self._peer.recv_into(self._into, min(left, len(self._into)))
            if count == 0:
                raise ConnectionError("redis-server has ended")
            left -= count


def _mget(keys: Any) -> bytes:
    """Returns an MGET request for 8-byte keys."""
    return b"".join([b"*%d\r\n$4\r\nMGET\r\n" % (len(keys) + 1), *_bulk(keys)])


def _bulk(keys: Any) -> list[bytes]:
    data = keys.astype("<u8").tobytes()
    return [b"$8\r\n" + data[at : at + 8] + b"\r\n" for at in range(0, len(data), 8)]


@contextmanager
def _redis(rows: np.ndarray[Any, Any]) -> Iterator[int]:
    """Runs a Redis server with the rows, and yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    command = ["redis-server", "--port", str(port), "--save", "", "--appendonly", "no", "--io-threads", "2"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _REDIS_DEADLINE_SEC
        while True:
            try:
                peer = socket.create_connection(("127.0.0.1", port))
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
        with peer:
            row_bytes = rows.shape[1] * 4
            for begin in range(0, len(rows), 1000):
                part = rows[begin : begin + 1000]
                data = part.tobytes()
                keys = _bulk(np.arange(begin, begin + len(part), dtype=np.uint64))
                values = [data[at : at + row_bytes] for at in range(0, len(data), row_bytes)]
                head = b"$%d\r\n" % row_bytes
                words = [
                    b"*3\r\n$3\r\nSET\r\n" + key + head + value + b"\r\n"
                    for key, value in zip(keys, values, strict=True)
                ]
                peer.sendall(b"".join(words))
                left = len(b"+OK\r\n") * len(part)
                while left > 0:
                    left -= len(peer.recv(left))
        yield port
    finally:
        server.terminate()
        server.wait(_REDIS_DEADLINE_SEC)
