"""Peers that announce, trickle and do not read, with a token of another namespace: a shard serves others meanwhile.

Raw sockets attack the data plane of a real process. The same in one process, with more cases and without waiting for
real limits: tests/cpp/greedy_peers_test.cc.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

import sparserow as sr
from sparserow.deploy.launch.security_files import add_token
from sparserow.proto.control import ControlClient
from sparserow.proto.names import id_of_name
from sparserow.proto.process.whole_file import write_whole
from sparserow.proto.security.security import Security
from sparserow.worker.api.session import Session
from sparserow_process import wait_until

DIM = 64
MIB = 1 << 20
MANY = np.arange(20_000, dtype=np.uint64)  # a request of 160 KB, which is charged

# The layouts of cpp_ext/rpc/wire/frame.h.
HEADER = struct.Struct("<IHBBQIIIIIIQqII")
SECTION = struct.Struct("<HHIQ")
HELLO = struct.Struct("<IBBHQQIIIIII")
TABLE = struct.Struct("<IIIBBHIfQQ")
MAGIC, HASH_VERSION = 0x4F525053, 1
HELLO_TYPE, HELLO_ACK, PULL_TYPE = 1, 2, 3
HELLO_SECTION, KEYS_SECTION = 1, 2
KNOWN_AND_VERSIONS = 5
NO_STEP, NO_VERSION = -1, (1 << 64) - 1


class Scene:
    """A cluster of one shard that takes tokens, and what an attacker needs to know of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tokens.yaml").write_text("tokens: []\n")
        self.tokens = {}
        for name, role, namespaces in (
            ("owner", "admin", ()),
            ("trainer", "train", ()),
            ("reader", "serve-read", ("other",)),
        ):
            self.tokens[name] = add_token(folder / "tokens.yaml", name, role, namespaces)  # type: ignore[arg-type]
            write_whole(folder / f"{name}.token", self.tokens[name], mode=0o600)
            (folder / f"{name}.yaml").write_text(f"token_file: {name}.token\ntoken_in_clear: true\n")
        (folder / "server.yaml").write_text("tokens: tokens.yaml\ntoken_file: owner.token\ntoken_in_clear: true\n")

    def look(self, address: str) -> None:
        self.address = address
        with ControlClient(address, security=Security.load(self.folder / "trainer.yaml")) as control:
            cluster = control.cluster()
        self.at = (cluster.shards[0].host, cluster.shards[0].port)
        self.route_epoch = cluster.route_epoch
        shards = [
            process
            for process in psutil.Process().children(recursive=True)
            if "ps" in process.cmdline() and "--shard" in " ".join(process.cmdline())
        ]
        (self.shard,) = shards

    def session(self, namespace: str = "mine") -> Session:
        return sr.connect(self.address, namespace, job="train", security=self.folder / "trainer.yaml")

    def connect(self, token: str) -> socket.socket:
        """A connection that has said HELLO."""
        peer = socket.create_connection(self.at, timeout=20)
        secret = self.tokens[token].encode()
        hello = HELLO.pack(MAGIC, 1, 1, 0, 0, 0, HASH_VERSION, 0, 0, 0, len(secret), 0) + secret
        body = SECTION.pack(HELLO_SECTION, 1, 0, len(hello)) + hello + bytes(-len(hello) % 8)
        peer.sendall(HEADER.pack(len(body), HELLO_TYPE, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, NO_STEP, 1, 0) + body)
        reply = HEADER.unpack(peer.recv(HEADER.size, socket.MSG_WAITALL))
        peer.recv(reply[0], socket.MSG_WAITALL)
        assert reply[1] == HELLO_ACK
        return peer

    def pull(self, table: str, n: int, *, announced: int | None = None, table_flags: int = 0) -> bytes:
        """A PULL of ``n`` keys of a table of dim ``DIM``; ``announced`` keys are in its lengths."""
        count = n if announced is None else announced
        known = NO_VERSION.to_bytes(8, "little") * n if table_flags else b""
        payload = TABLE.pack(id_of_name(table), 1, DIM, 0, table_flags, 0, count, 0.0, 0, 0)
        payload += np.arange(n, dtype="<u8").tobytes() + known
        body_bytes = SECTION.size + TABLE.size + 8 * count * (2 if table_flags else 1)
        body = SECTION.pack(KEYS_SECTION, 1, 0, body_bytes - SECTION.size) + payload
        header = HEADER.pack(body_bytes, PULL_TYPE, 1, 0, 7, 60_000, 0, 0, 0, 0, self.route_epoch, 0, NO_STEP, 1, 0)
        return header + body


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    made = Scene(tmp_path_factory.mktemp("attacked"))
    sr.use_security(made.folder / "server.yaml")
    try:
        running = sr.local_cluster(shards=1)
        with running as cluster:
            sr.use_security(None)
            made.look(cluster.address)
            yield made
    finally:
        sr.use_security(None)


def is_closed(peer: socket.socket) -> bool:
    """Whether the other side has closed the connection, which has sent nothing that was not read."""
    if not select.select([peer], [], [], 0)[0]:
        return False
    try:
        return peer.recv(1, socket.MSG_PEEK) == b""
    except ConnectionError:
        return True


def check_pulls(session: Session, times: int) -> None:
    """Pulls by an honest worker come in time, one after the other."""
    table = session.create_table("a", dim=DIM, optimizer=sr.optim.SGD(lr=0.5))
    for _ in range(times):
        began = time.monotonic()
        assert table.pull(MANY).shape == (len(MANY), DIM)
        assert time.monotonic() - began < 20


def test_bodies_that_are_announced_and_trickle(scene: Scene) -> None:
    with scene.session() as session, scene.session("other") as other, contextlib.ExitStack() as stack:
        other.create_table("a", dim=DIM, optimizer=sr.optim.SGD(lr=0.5)).pull(MANY)
        peers = [stack.enter_context(scene.connect("reader")) for _ in range(4)]
        attack = scene.pull("other/a", 20, announced=(1 << 30) // 8 - 7)
        for peer in peers:
            peer.sendall(attack[:312])
        time.sleep(0.5)
        check_pulls(session, 20)
        wait_until(lambda: all(map(is_closed, peers)), "that slow bodies are given up")
        check_pulls(session, 1)


def test_replies_that_are_not_taken(scene: Scene) -> None:
    with scene.session() as session, scene.session("other") as other, contextlib.ExitStack() as stack:
        other.create_table("a", dim=DIM, optimizer=sr.optim.SGD(lr=0.5)).pull(MANY)
        check_pulls(session, 3)
        before = scene.shard.memory_info().rss
        peers = [stack.enter_context(scene.connect("reader")) for _ in range(8)]
        for peer in peers:
            peer.sendall(scene.pull("other/a", 300_000, table_flags=KNOWN_AND_VERSIONS))  # 80 MB a reply
        time.sleep(3)
        check_pulls(session, 20)
        assert scene.shard.memory_info().rss - before < 160 * MIB


def test_a_hello_that_trickles(scene: Scene) -> None:
    with socket.create_connection(scene.at, timeout=20) as peer:
        began = time.monotonic()
        hello = HEADER.pack(64, HELLO_TYPE, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, NO_STEP, 1, 0) + bytes(64)
        for byte in hello:
            if is_closed(peer):
                break
            with contextlib.suppress(ConnectionError):
                peer.sendall(bytes([byte]))
            time.sleep(0.2)
        assert is_closed(peer)
        assert time.monotonic() - began < 15


def test_silent_connections_keep_nobody_out(scene: Scene) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(600):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection(scene.at, timeout=20))
        with scene.session() as session:
            check_pulls(session, 3)


def test_a_control_plane_connection_that_does_not_greet(scene: Scene) -> None:
    host, port = scene.address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=30) as peer:
        began = time.monotonic()
        while peer.recv(1024):
            pass
        assert time.monotonic() - began < 15
