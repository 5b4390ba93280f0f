"""Redis: rows as strings, over a plain socket with pipelined MGET and MSET of 1,000 keys each.

Rows of a reply have a known length, so that they are copied into an array without a parser. ``lookup`` is one MGET.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .worker import Tools

_AT_ONCE = 1000  # keys of a command
_START_SEC = 30.0
_REPLY_SEC = 60.0


def serve(asked: dict[str, Any], tools: Tools) -> None:
    """Becomes redis-server, on the port of ``asked``; it keeps no files."""
    tools.ready(os.getpid())
    program = shutil.which("redis-server")
    assert program is not None
    saves = ["--save", "", "--appendonly", "no"]
    os.execv(program, [program, "--port", str(asked["port"]), "--bind", "127.0.0.1", "--io-threads", "2", *saves])


def measure(asked: dict[str, Any], tools: Tools) -> None:
    """Fills and measures a server for each dim, one after the other."""
    ended = subprocess.run(
        ["redis-server", "--version"], capture_output=True, text=True, timeout=_START_SEC, check=True
    )
    tools.versions["redis-server"] = ended.stdout.split("v=")[1].split()[0]
    for dim in tools.dims():
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        tools.start("serve", port=port)
        with _connected(port) as peer:
            _measure_dim(peer, dim, asked, tools)
        tools.stop()


def _connected(port: int) -> socket.socket:
    deadline = time.monotonic() + _START_SEC
    while True:
        try:
            peer = socket.create_connection(("127.0.0.1", port), timeout=_REPLY_SEC)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return peer
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _measure_dim(peer: socket.socket, dim: int, asked: dict[str, Any], tools: Tools) -> None:
    row_bytes = 4 * dim
    ones = np.ones((_AT_ONCE, dim), np.float32)
    for begin in range(0, asked["rows"], _AT_ONCE):
        keys = np.arange(begin, min(begin + _AT_ONCE, asked["rows"]))
        peer.sendall(_mset(keys, ones[: len(keys)]))
        _receive(peer, memoryview(bytearray(5)))
    keys_of_batch = asked["keys"]
    sizes = [min(_AT_ONCE, keys_of_batch - begin) for begin in range(0, keys_of_batch, _AT_ONCE)]
    replies = [bytearray(_reply_bytes(size, row_bytes)) for size in sizes]
    rows = np.zeros((keys_of_batch, dim), np.float32)
    batches = tools.batches()
    grads = tools.grads(dim)

    def pull(keys: Any) -> None:
        for begin in range(0, keys_of_batch, _AT_ONCE):
            peer.sendall(_mget(keys[begin : begin + _AT_ONCE]))
        for index, reply in enumerate(replies):
            _receive(peer, memoryview(reply))
            part = rows[index * _AT_ONCE : index * _AT_ONCE + sizes[index]]
            part.view(np.uint8)[:] = _values(reply, sizes[index], row_bytes)

    def push(keys: Any) -> None:
        for begin in range(0, keys_of_batch, _AT_ONCE):
            peer.sendall(_mset(keys[begin : begin + _AT_ONCE], grads[begin : begin + _AT_ONCE]))
        _receive(peer, memoryview(bytearray(5 * len(sizes))))

    tools.time("pull", dim, batches.__next__, pull)
    tools.time("lookup", dim, batches.__next__, pull)
    tools.time("push", dim, batches.__next__, push)


def _receive(peer: socket.socket, into: memoryview) -> None:
    while into:
        count = peer.recv_into(into)
        if count == 0:
            raise ConnectionError("redis-server has ended")
        into = into[count:]


def _reply_bytes(keys: int, row_bytes: int) -> int:
    return len(b"*%d\r\n" % keys) + keys * (len(b"$%d\r\n" % row_bytes) + row_bytes + 2)


def _values(reply: bytearray, keys: int, row_bytes: int) -> Any:
    """Returns the rows (keys, row_bytes) uint8 of a reply in which each key has one."""
    head, length = len(b"*%d\r\n" % keys), len(b"$%d\r\n" % row_bytes)
    if reply[head : head + length] != b"$%d\r\n" % row_bytes:
        raise RuntimeError(f"redis-server has answered {bytes(reply[:40])!r}")
    strings = np.frombuffer(reply, np.uint8, offset=head).reshape(keys, length + row_bytes + 2)
    return strings[:, length : length + row_bytes]


def _bulk(texts: Any) -> Any:
    """Returns the strings (count, bytes) uint8 with the length of each before it."""
    head = np.frombuffer(b"$%d\r\n" % texts.shape[1], np.uint8)
    ends = np.frombuffer(b"\r\n", np.uint8)
    out = np.empty((len(texts), len(head) + texts.shape[1] + 2), np.uint8)
    out[:, : len(head)], out[:, len(head) : -2], out[:, -2:] = head, texts, ends
    return out


def _key_texts(keys: Any) -> Any:
    return np.ascontiguousarray(keys, "<u8").view(np.uint8).reshape(len(keys), 8)


def _mget(keys: Any) -> bytes:
    head = b"*%d\r\n$4\r\nMGET\r\n" % (len(keys) + 1)
    return head + bytes(_bulk(_key_texts(keys)).tobytes())


def _mset(keys: Any, rows: Any) -> bytes:
    values = np.ascontiguousarray(rows).view(np.uint8).reshape(len(keys), -1)
    pairs = np.concatenate([_bulk(_key_texts(keys)), _bulk(values)], axis=1)
    return b"*%d\r\n$4\r\nMSET\r\n" % (2 * len(keys) + 1) + bytes(pairs.tobytes())
