"""Calls of gRPC without a token, of great size, in great number, or that send nothing: others are answered."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
from grpc_health.v1 import health_pb2

import sparserow as sr
from sparserow.deploy.launch.security_files import add_token
from sparserow.proto import changes_pb2, control_pb2 as pb, rows_pb2, serving_pb2
from sparserow.proto.grpc_status import CHANNEL_OPTIONS
from sparserow.proto.process.whole_file import write_whole
from sparserow_process import Launcher

MIB = 1 << 20
HUGE = bytes(256 * MIB)
AT_ONCE = 4
METHODS = {
    "coordinator": "/sparserow.v1.Coordinator/GetCluster",
    "shard": "/sparserow.v1.Changes/GetVersions",
    "serve": "/sparserow.v1.Serving/Lookup",
    "gateway": "/sparserow.v1.Rows/Push",
}
HEALTH = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


class Scene:
    """A coordinator, a shard, a serving process and a gateway that ask for tokens, on plain connections."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tokens.yaml").write_text("tokens: []\n")
        self.tokens = {}
        for name, role in (("owner", "admin"), ("trainer", "train"), ("reader", "serve-read")):
            self.tokens[name] = add_token(folder / "tokens.yaml", name, role, ())  # type: ignore[arg-type]
            write_whole(folder / f"{name}.token", self.tokens[name], mode=0o600)
        (folder / "server.yaml").write_text("tokens: tokens.yaml\ntoken_file: owner.token\ntoken_in_clear: true\n")
        self.places: dict[str, tuple[str, psutil.Process]] = {}

    def call(
        self,
        process: str,
        method: str,
        message: bytes,
        token: str | None = None,
        deadline_sec: float = 60.0,
    ) -> Any:
        """The reply to a message, or the error's code."""
        options = (*CHANNEL_OPTIONS, ("grpc.max_send_message_length", -1))
        metadata = (("authorization", f"Bearer {self.tokens[token]}"),) if token is not None else ()
        with grpc.insecure_channel(self.places[process][0], options=options) as channel:
            try:
                return channel.unary_unary(method)(message, timeout=deadline_sec, metadata=metadata)
            except grpc.RpcError as error:
                return error.code()

    def grown(self, process: str, calls: list[Any]) -> int:
        """How many MiB a process takes at most, beyond what it had, while threads make these calls."""
        place = self.places[process][1]
        began, most = place.memory_info().rss, 0
        threads = [threading.Thread(target=call) for call in calls]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            most = max(most, place.memory_info().rss)
            time.sleep(0.005)
        return (max(most, began) - began) // MIB


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    made = Scene(tmp_path_factory.mktemp("attacked"))
    root = str(made.folder / "models")
    with contextlib.ExitStack() as stack:
        stack.callback(sr.use_security, None)
        sr.use_security(made.folder / "server.yaml")
        cluster = stack.enter_context(sr.local_cluster(shards=1))
        with sr.connect(cluster.address, "ads", job="publish") as session:
            table = session.create_table("served", dim=4, optimizer=sr.optim.SGD(lr=0.5))
            table.assign(np.arange(10, dtype=np.uint64), np.ones((10, 4), np.float32))
            session.publish("ctr", root=root)
            (shard,) = session.core.catalog.status().shards  # type: ignore[attr-defined]
        children = psutil.Process().children(recursive=True)

        def process_of(word: str) -> psutil.Process:
            return next(each for each in children if word in each.cmdline())

        made.places["coordinator"] = (cluster.address, process_of("up"))
        made.places["shard"] = (f"{shard.control.host}:{shard.control.port}", process_of("ps"))
        launcher = Launcher(made.folder)
        stack.callback(launcher.kill_all)
        launcher.environment["SPARSEROW_SECURITY"] = str(made.folder / "server.yaml")
        serving = launcher.start("serve", f"--root={root}", "--model=ctr", "--port=0")
        made.places["serve"] = (serving.wait_for(r"ready at gRPC ([^\s,]+)")[1], psutil.Process(serving.popen.pid))
        gateway = launcher.start("gateway", f"--coordinator={cluster.address}", "--port=0")
        made.places["gateway"] = (gateway.wait_for(r"ready at gRPC (\S+)")[1], psutil.Process(gateway.popen.pid))
        sr.use_security(None)
        yield made


@pytest.mark.parametrize("process", METHODS)
@pytest.mark.parametrize("method", ["a method", "health", "reflection", "no method"])
def test_messages_without_a_token_are_not_taken(scene: Scene, process: str, method: str) -> None:
    path = {"a method": METHODS[process], "health": HEALTH, "reflection": REFLECTION}.get(method, "/nobody/Nothing")
    outcomes: list[Any] = []
    grown = scene.grown(process, [lambda: outcomes.append(scene.call(process, path, HUGE))] * AT_ONCE)
    assert grown < 128, grown
    if method == "health":
        assert outcomes == [b"\x08\x01"] * AT_ONCE  # it serves
    else:
        refused = grpc.StatusCode.UNIMPLEMENTED if method == "no method" else grpc.StatusCode.PERMISSION_DENIED
        assert outcomes == [refused] * AT_ONCE


@pytest.mark.parametrize("process", METHODS)
def test_messages_with_a_token_have_a_bound(scene: Scene, process: str) -> None:
    grown = scene.grown(process, [lambda: scene.call(process, METHODS[process], HUGE, "owner")] * AT_ONCE)
    assert grown < 200, grown
    assert scene.call(process, METHODS[process], HUGE, "owner") is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert scene.call(process, HEALTH, HUGE, "owner") is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_honest_calls_are_answered_beside_them(scene: Scene) -> None:
    ended = threading.Event()

    def attack() -> None:
        while not ended.is_set():
            scene.call("coordinator", METHODS["coordinator"], HUGE)

    attackers = [threading.Thread(target=attack) for _ in range(AT_ONCE)]
    for attacker in attackers:
        attacker.start()
    try:
        for _ in range(20):
            reply = scene.call("coordinator", METHODS["coordinator"], b"", "reader", deadline_sec=20.0)
            assert pb.GetClusterReply.FromString(reply).route.slot_count > 0
    finally:
        ended.set()
        for attacker in attackers:
            attacker.join()


def test_calls_that_send_no_message_hold_no_place_of_others(scene: Scene) -> None:
    """A client with a token opens calls and sends nothing: its own part of the memory is taken, and no one else's."""
    metadata = (("authorization", f"Bearer {scene.tokens['trainer']}"),)
    with grpc.insecure_channel(scene.places["gateway"][0]) as channel:
        silent = channel.stream_unary(METHODS["gateway"])
        ended = threading.Event()

        def nothing() -> Iterator[bytes]:
            ended.wait(60.0)
            return
            yield b""

        calls = [silent.future(nothing(), metadata=metadata, timeout=60.0) for _ in range(200)]
        try:
            time.sleep(1.0)
            lookup = serving_pb2.LookupRequest(model="none").SerializeToString()
            assert scene.call("serve", METHODS["serve"], lookup, "reader") is grpc.StatusCode.NOT_FOUND
            answered = scene.call("gateway", METHODS["gateway"], b"", "owner", deadline_sec=20.0)
            assert answered is grpc.StatusCode.INVALID_ARGUMENT  # it was read
        finally:
            ended.set()
            for call in calls:
                call.cancel()


SERVICES = {"Coordinator": "coordinator", "Shard": "shard", "Changes": "shard", "Serving": "serve", "Rows": "gateway"}
MANY = 10_000_000


def many_entries(descriptor: Any, count: int, path: tuple[int, ...] = ()) -> Iterator[tuple[str, bytes]]:
    """Yields the name of each repeated field, and of each one of bytes, with a message that has many entries there."""
    for field in descriptor.fields:
        if field.type == field.TYPE_MESSAGE and len(path) < 3:
            yield from many_entries(field.message_type, count, (*path, field.number))
        if not field.is_repeated and field.type != field.TYPE_BYTES:
            continue
        is_packed = field.is_repeated and field.type not in (field.TYPE_MESSAGE, field.TYPE_STRING, field.TYPE_BYTES)
        if is_packed or not field.is_repeated:
            raw = nested(field.number, b"\x01" * count)
        else:
            raw = nested(field.number, b"") * count
        for number in reversed(path):
            raw = nested(number, raw)
        yield f"{descriptor.name}.{field.name}", raw


def nested(number: int, payload: bytes) -> bytes:
    """A field of bytes, text, packed numbers or a message (protobuf.dev/programming-guides/encoding)."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


def methods() -> Iterator[Any]:
    for file in (pb, rows_pb2, serving_pb2, changes_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            yield from service.methods


@pytest.mark.parametrize("method", list(methods()), ids=lambda method: method.full_name.removeprefix("sparserow.v1."))
def test_many_entries_are_refused_and_hold_nobody_up(scene: Scene, method: Any) -> None:
    process = SERVICES[method.containing_service.name]
    path = f"/{method.containing_service.full_name}/{method.name}"
    counts = (MANY, 1_900_000) if process == "coordinator" else (MANY,)  # these fit into its messages
    for field, raw in (each for count in counts for each in many_entries(method.input_type, count)):
        ended = threading.Event()
        outcome: list[Any] = []

        def attack(raw: bytes = raw, outcome: list[Any] = outcome, ended: threading.Event = ended) -> None:
            outcome.append(scene.call(process, path, raw, "owner"))
            ended.set()

        attacker = threading.Thread(target=attack)
        attacker.start()
        while not ended.is_set():
            assert scene.call(process, HEALTH, b"", "reader", deadline_sec=10.0) == b"\x08\x01", field
        attacker.join()
        assert isinstance(outcome[0], grpc.StatusCode), field
        assert outcome[0] is not grpc.StatusCode.INTERNAL, field


@pytest.mark.parametrize("process", METHODS)
def test_malformed_messages_are_refused(scene: Scene, process: str) -> None:
    for method in methods():
        if SERVICES[method.containing_service.name] == process and method.input_type.fields:
            path = f"/{method.containing_service.full_name}/{method.name}"
            for raw in (b"\xff" * 20, b"\x0a\xff\xff\xff\xff\x0f"):
                assert scene.call(process, path, raw, "owner") is grpc.StatusCode.INVALID_ARGUMENT, path
    metadata = (("authorization", f"Bearer {scene.tokens['reader']}"),)
    with grpc.insecure_channel(scene.places[process][0]) as channel:
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
        watched = watch(b"", timeout=20.0, metadata=metadata)
        assert next(iter(watched)) == b"\x08\x01"
        watched.cancel()
        with pytest.raises(grpc.RpcError) as refused:  # calls that stay are not for strangers
            next(iter(watch(b"", timeout=20.0)))
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    told = scene.call(process, "/grpc.health.v1.Health/List", b"", "reader")
    assert health_pb2.HealthListResponse.FromString(told).statuses[""].status == health_pb2.HealthCheckResponse.SERVING


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2 (RFC 9113, 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


@pytest.mark.parametrize("flood", ["rapid reset", "continuation", "settings", "ping"])
def test_floods_of_http2_leave_others_served(scene: Scene, flood: str) -> None:
    """CVE-2023-44487, CVE-2024-27316, CVE-2019-9512 and -9515, as far as one connection may go on."""
    host, _, port = scene.places["coordinator"][0].rpartition(":")
    path = METHODS["coordinator"].encode()
    headers = b"\x83\x86" + b"\x44" + bytes([len(path)]) + path + b"\x41\x01h"  # POST http :path :authority
    headers += b"\x0f\x10\x10application/grpc" + b"\x40\x02te\x08trailers"
    process = scene.places["coordinator"][1]
    before = process.memory_info().rss
    with socket.create_connection((host, int(port)), timeout=5.0) as peer:
        peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0))
        stream = 1
        with contextlib.suppress(OSError):  # the server may end the connection
            if flood == "continuation":
                peer.sendall(frame(1, 0, 1, headers))
            for _ in range(20_000):
                if flood == "rapid reset":
                    peer.sendall(frame(1, 4, stream, headers) + frame(3, 0, stream, struct.pack(">I", 8)))
                    stream += 2
                elif flood == "continuation":
                    peer.sendall(frame(9, 0, 1, b"\x40\x02xx\x7f\x81\x00" + b"a" * 256))
                elif flood == "settings":
                    peer.sendall(frame(4, 0, 0, struct.pack(">HI", 4, 65535)))
                else:
                    peer.sendall(frame(6, 0, 0, bytes(8)))
        reply = scene.call("coordinator", METHODS["coordinator"], b"", "reader", deadline_sec=20.0)
        assert pb.GetClusterReply.FromString(reply).route.slot_count > 0
    assert (process.memory_info().rss - before) // MIB < 128
