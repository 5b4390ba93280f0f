"""Attacks on the HTTP doors of running processes, by raw sockets: what a peer may hold, and what it is told."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

import sparserow as sr
from raw_http import Door, close_all, closes_within, peak_bytes, push_bytes, read_reply, request, reset_peak
from sparserow.deploy.launch.security_files import add_token, init_security, sign_certificate
from sparserow_process import Launcher, Process, free_port, wait_until

MIB = 1 << 20
DIM = 16
ROWS = 20_000
LOOKUP = json.dumps({"model": "ctr", "tables": {"user": [1, 2]}}).encode()


@dataclass
class Served:
    """A serving process with TLS and tokens, and its HTTP door."""

    process: Process
    door: Door
    folder: Path
    token: str
    metrics: Door

    @property
    def pid(self) -> int:
        return self.process.popen.pid

    def answers(self, source: str = "127.0.0.1") -> bool:
        """Whether an honest client is answered."""
        return self.door.ask("POST", "/v1/lookup", LOOKUP, self.token, source=source).status == 200


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A published model whose rows are all there."""
    folder = str(tmp_path_factory.mktemp("models"))
    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, "ads") as session:
        table = session.create_table("user", dim=DIM, optimizer=sr.optim.SGD(lr=0.5))
        keys = np.arange(ROWS, dtype=np.uint64)
        table.assign(keys, np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32))
        session.publish("ctr", root=folder)
    return folder


@contextlib.contextmanager
def serving(root: str, folder: Path, *, limits: str = "", client_ca: bool = False) -> Iterator[Served]:
    path = init_security(folder / "security", ["127.0.0.1"], valid_sec=3600)
    token = add_token(folder / "security" / "tokens.yaml", "reader", "serve-read", ("ads",))
    path.write_text(path.read_text() + ("client_ca: ca.pem\n" if client_ca else "") + limits)
    launcher = Launcher(folder)
    launcher.environment["SPARSEROW_SECURITY"] = str(path)
    page = free_port()
    try:
        process = launcher.start(
            "serve", f"--root={root}", "--model=ctr", "--port=0", "--http-port=0", f"--metrics-port={page}"
        )
        host, _, port = process.wait_for(r"HTTP (\S+)\n")[1].rpartition(":")
        door = Door(host, int(port), folder / "security" / "ca.pem")
        yield Served(process, door, folder / "security", token, Door(host, page))
    finally:
        launcher.kill_all()


@pytest.fixture(scope="module")
def served(root: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With short times, so that slow clients are seen to be cut off."""
    limits = "limits:\n  http: {head_sec: 2, body_sec: 2}\n"
    with serving(root, tmp_path_factory.mktemp("served"), limits=limits) as running:
        assert running.answers()
        yield running


def test_a_body_is_not_read_before_the_token(served: Served) -> None:
    before = reset_peak(served.pid)
    connections = [served.door.open() for _ in range(3)]
    body = b"[" + b"[]," * (MIB // 3)

    def attack(connection: ssl.SSLSocket) -> None:
        connection.sendall(request("POST", "/v1/lookup", b"", length=60 * MIB))
        push_bytes(connection, body, 60)

    threads = [threading.Thread(target=attack, args=(connection,)) for connection in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert served.answers()
    assert peak_bytes(served.pid) - before < 32 * MIB
    close_all(connections)
    with served.door.open() as connection:
        connection.sendall(request("POST", "/v1/lookup", b"", length=60 * MIB))
        assert read_reply(connection).status == 401  # it came without a byte of the body


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b'{"model": ' + b"[" * 2000, 400, "nested"),
        (b"[" * 1_000_000, 400, "lists and objects"),
        (b'{"tables": {' + b", ".join(b'"t%d": 1' % i for i in range(2000)) + b"}}", 400, "names"),
        (b'{"tables": {' + b", ".join(b'"t%d": 1' % i for i in range(100_000)) + b"}}", 400, "quotation marks"),
        (b'{"tables": {"user": [' + b"[]," * 300_000 + b"1]}}", 400, "lists and objects"),
        (b'{"model": "' + b"\\\\" * 100_000 + b'"}', 400, "escapes"),
        (b'{"model": "ctr", "tables": {"user": [' + b"9" * 5000 + b"]}}", 400, ""),
        (b"\xff\xfe{", 400, "no JSON"),
        (b"]" * 100_000, 400, "no JSON"),
        (b"null", 400, "the body must be"),
        (b'{"model": "ctr", "tables": {"user": [1], "user": [2]}}', 400, "'user' is named twice"),
    ],
    ids=["depth", "bomb", "names", "quotes", "containers", "escapes", "digits", "bytes", "closers", "null", "twice"],
)
def test_json_is_bounded_before_it_is_parsed(served: Served, body: bytes, status: int, words: str) -> None:
    before = reset_peak(served.pid)
    reply = served.door.ask("POST", "/v1/lookup", body, served.token)
    assert (reply.status, words in reply.document["error"]) == (status, True), reply.body
    assert peak_bytes(served.pid) - before < 32 * MIB
    assert b"Traceback" not in reply.body


def test_lengths_and_encodings_that_are_refused(served: Served) -> None:
    door, token = served.door, served.token
    lookup = request("POST", "/v1/lookup", LOOKUP, token)
    with door.open() as connection:
        connection.sendall(request("POST", "/v1/lookup", b"", token, length=60 * MIB))
        reply = read_reply(connection)
        assert reply.status == 413
        assert "limits.http.body_bytes" in reply.document["error"]
    assert door.ask("POST", "/v1/lookup", None, token).status == 411
    with door.open() as connection:  # a kilobyte that would become a gigabyte
        connection.sendall(lookup.replace(b"Host:", b"Content-Encoding: gzip\r\nHost:"))
        assert read_reply(connection).status == 415
    with door.open() as connection:
        connection.sendall(lookup.replace(b"Host:", b"Expect: 100-continue\r\nHost:"))
        assert read_reply(connection).status == 100
        assert read_reply(connection).status == 200


def test_slow_clients_have_an_absolute_time(served: Served) -> None:
    with served.door.open() as silent, served.door.open() as head, served.door.open() as body:
        body.sendall(request("POST", "/v1/lookup", b"", served.token, length=1000))
        began = time.monotonic()
        for letter in b"GET /v1/health HTTP/1.1\r\nX: aaaaaaaaaaaaaaaaa":
            try:
                head.sendall(bytes([letter]))
                body.sendall(b" ")
            except OSError:
                break
            time.sleep(0.25)
            if time.monotonic() - began > 8:
                break
        for connection in (silent, head, body):
            assert closes_within(connection, 5)
    assert served.answers()
    assert "Traceback" not in served.process.err


def test_connections_are_bounded_by_peer_and_shared_when_they_are_short(root: str, tmp_path: Path) -> None:
    limits = "limits:\n  client_connections: 30\n  http: {connections: 40, head_sec: 60}\n"
    with serving(root, tmp_path, limits=limits) as served:
        threads = psutil.Process(served.pid).num_threads()
        connections = []
        for _ in range(30):
            connections.append(served.door.open())
        with pytest.raises(OSError):  # noqa: PT011 - it ends within the handshake, in whichever way
            served.door.open()
        connections += [served.door.open(source="127.0.0.3") for _ in range(10)]
        for number in range(4, 9):  # all places are taken; whoever holds the most gives one up
            assert served.answers(f"127.0.0.{number}")
        assert psutil.Process(served.pid).num_threads() <= threads + 40
        close_all(connections)

        def is_answered() -> bool:  # a connection counts until the server has seen its end
            with contextlib.suppress(OSError, AssertionError):
                return served.answers()
            return False

        wait_until(is_answered, "an answer when the connections have been closed")


def test_a_get_with_a_body_leaves_nothing_in_the_stream(served: Served) -> None:
    inner = request("GET", "/v1/models", None, served.token)
    with served.door.open() as connection:
        connection.sendall(request("GET", "/v1/health", inner) + request("GET", "/v1/smuggled", None, served.token))
        first = read_reply(connection)
        assert first.document == {"ready": True}
        second = read_reply(connection)
        assert (second.status, b"smuggled" in second.body) == (404, True)
        connection.settimeout(1.0)
        with contextlib.suppress(TimeoutError):
            assert connection.recv(1) == b"", "the body was answered as a request"


@pytest.mark.parametrize(
    "head",
    [
        b"POST /v1/lookup HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/lookup HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"POST /v1/lookup HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/lookup HTTP/1.1\r\nHost: a\r\nContent-Length: 1_0\r\n\r\n0123456789",
        b"GET /v1/health HTTP/1.1\r\nA b: c\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: y\r\n" % i for i in range(5000)) + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"\r\n\r\n\x00\x00 nonsense\r\n\r\n",
    ],
)
def test_malformed_requests_end_the_connection(served: Served, head: bytes) -> None:
    for token in ("", served.token):
        sent = head.replace(b"Host: a\r\n", f"Host: a\r\nAuthorization: Bearer {token}\r\n".encode()) if token else head
        with served.door.open() as connection:
            with contextlib.suppress(OSError):
                connection.sendall(sent)
            assert closes_within(connection, 10)
    assert served.answers()
    assert "Traceback" not in served.process.err


def test_other_methods_are_told_those_of_the_path(served: Served) -> None:
    for path, allowed in (("/v1/health", "GET"), ("/v1/models", "GET"), ("/v1/lookup", "POST")):
        reply = served.door.ask("DELETE", path, None, served.token)
        assert reply.status == 405
        assert f"Allow: {allowed}" in reply.head
        assert served.door.ask("DELETE", path, None, "").status == 404
    for path in ("/v1/health", "/v1/models"):  # a HEAD is a GET without the body
        with served.door.open() as connection:
            connection.sendall(request("HEAD", path, None, served.token))
            reply = b""
            while not reply.endswith(b"\r\n\r\n"):
                reply += connection.recv(65536)
        assert reply.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"model": "ctr", "tables": {"user": [1]}, "routing_key": "\\ud800"}', "routing_key: "),
        ('{"model": "ctr@' + "9" * 5000 + '", "tables": {"user": [1]}}', "alias: "),
        ('{"model": "ctr@\\u0661", "tables": {"user": [1]}}', "alias: "),  # a digit in Arabic
        ('{"model": "ctr\\ud800", "tables": {"user": [1]}}', "model: "),
        ('{"model": "ctr", "tables": {"user\\ud800": [1]}}', "table "),
        ('{"model": "ctr", "tables": {"user": ["\\ud800"]}}', "table "),
        ('{"model": "ctr", "tables": {"user": [' + "9" * 5000 + "]}}", ""),
        ('{"model": "ctr", "tables": {"user": [1e400]}}', ""),
        ('{"model": "ctr", "tables": {"user": [1]}, "deadline_ms": 1e400}', ""),
        ('{"model": "ctr", "tables": {"user": [1]}, "deadline_ms": NaN}', ""),
    ],
)
def test_texts_and_numbers_at_their_edges_are_refused(served: Served, body: str, words: str) -> None:
    reply = served.door.ask("POST", "/v1/lookup", body.encode(), served.token)
    assert reply.status in (400, 404), reply
    assert words in json.loads(reply.body)["error"]
    assert "Traceback" not in served.process.err


def test_log_lines_of_malformed_requests_are_few(served: Served) -> None:
    before = len(served.process.err.splitlines())
    for _ in range(200):
        with served.door.open() as connection:
            connection.sendall(b"nonsense\r\n\r\n")
            assert closes_within(connection, 10)
    assert "Traceback" not in served.process.err
    assert len(served.process.err.splitlines()) - before <= 20


def test_without_a_token_no_name_and_no_path_is_told(served: Served) -> None:
    told = b""
    for method, path, body in (
        ("GET", "/v1/health", None),
        ("GET", "/v1/models", None),
        ("GET", "/nope", None),
        ("POST", "/v1/lookup", LOOKUP),
        ("POST", "/v1/lookup", b"nonsense"),
        ("PUT", "/v1/lookup", b""),
    ):
        for token in ("", "not a token"):
            reply = served.door.ask(method, path, body, token)
            assert reply.status in (200, 401, 404), (path, reply.head)
            told += reply.head.encode() + reply.body
    for name in (b"ctr", b"user", b"/v1/", b"ads", b"nope", b"aiohttp", b"Python"):
        assert name not in told, told


def test_a_token_is_told_of_its_own_namespaces_alone(served: Served) -> None:
    other = add_token(served.folder / "tokens.yaml", "shop", "serve-read", ("shop",))

    def known() -> bool:
        return served.door.ask("GET", "/v1/models", None, other).status == 200

    wait_until(known, "the new token")
    assert served.door.ask("GET", "/v1/models", None, other).document == {"versions": [], "aliases": []}
    assert served.door.ask("GET", "/v1/models", None, served.token).document["versions"][0]["model"] == "ctr"


def test_a_reply_above_the_limit_is_refused_with_what_fits(root: str, tmp_path: Path) -> None:
    limits = "limits:\n  http: {reply_bytes: 1MiB, head_sec: 2, body_sec: 2}\n"
    with serving(root, tmp_path, limits=limits) as served:
        before = reset_peak(served.pid)

        def asking(count: int) -> bytes:
            return json.dumps({"model": "ctr", "tables": {"user": list(range(count))}}).encode()

        reply = served.door.ask("POST", "/v1/lookup", asking(ROWS), served.token)
        assert reply.status == 413
        fits = int(reply.document["error"].rpartition("at most ")[2].split()[0].replace(",", ""))
        assert 1000 < fits < ROWS
        whole = served.door.ask("POST", "/v1/lookup", asking(fits), served.token)
        assert whole.status == 200
        assert len(whole.body) <= MIB
        assert len(whole.document["tables"]["user"]["rows"]) == fits
        assert served.door.ask("POST", "/v1/lookup", asking(fits + 1), served.token).status == 413
        assert peak_bytes(served.pid) - before < 32 * MIB


def test_clients_that_do_not_read_their_replies_are_cut_off(root: str, tmp_path: Path) -> None:
    limits = "limits:\n  http: {reply_sec: 3, head_sec: 6, memory_bytes: 256MiB}\n"
    with serving(root, tmp_path, limits=limits) as served:
        body = json.dumps({"model": "ctr", "tables": {"user": list(range(ROWS))}}).encode()
        assert served.door.ask("POST", "/v1/lookup", body, served.token).status == 200
        before = reset_peak(served.pid)
        connections = [served.door.open() for _ in range(30)]
        for connection in connections:
            connection.sendall(request("POST", "/v1/lookup", body, served.token))
        time.sleep(4)
        assert served.answers()
        assert peak_bytes(served.pid) - before < 256 * MIB  # 30 replies would be 200 MiB of text, and more of rows
        wait_until(lambda: len(psutil.Process(served.pid).net_connections("tcp")) < 20, "the connections to be closed")
        close_all(connections)
        assert "Traceback" not in served.process.err


def test_a_connection_ends_without_its_clients_part_of_the_close(served: Served) -> None:
    """A TLS connection ends with a message of both sides; a client that reads nothing never sends its own."""
    with served.door.open() as connection:
        port = connection.getsockname()[1]
        connection.sendall(request("POST", "/v1/lookup", LOOKUP, served.token))

        def is_held() -> bool:
            held = psutil.Process(served.pid).net_connections("tcp")
            return any(each.raddr and each.raddr.port == port for each in held)

        assert is_held()
        wait_until(lambda: not is_held(), "the connection to be closed", 25)


def test_certificates_change_under_way_and_clients_show_theirs(root: str, tmp_path: Path) -> None:
    with serving(root, tmp_path, client_ca=True) as served:
        sign_certificate(served.folder, "client", ["client"], valid_sec=3600)
        identity = (str(served.folder / "client.pem"), str(served.folder / "client.key"))
        assert served.door.ask("GET", "/v1/health", identity=identity).status == 200
        with pytest.raises((OSError, AssertionError)):
            served.door.ask("GET", "/v1/health")

        def shown() -> bytes | None:
            with served.door.open(identity=identity) as connection:
                return connection.getpeercert(binary_form=True)

        first = shown()
        with served.door.open(identity=identity) as kept:
            sign_certificate(served.folder, "server", ["127.0.0.1"], valid_sec=3600)
            wait_until(lambda: shown() != first, "the new certificate")
            kept.sendall(request("POST", "/v1/lookup", LOOKUP, served.token))
            assert read_reply(kept).status == 200  # an open connection goes on


def test_the_metrics_page_is_bounded_too(served: Served) -> None:
    threads = psutil.Process(served.pid).num_threads()
    connections = [served.metrics.open() for _ in range(300)]
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
    assert psutil.Process(served.pid).num_threads() <= threads + 8
    close_all(connections)
    post = b"POST /metrics HTTP/1.1\r\nContent-Length: 9\r\n\r\n"
    for head in (b"nonsense\r\n\r\n", b"GET /metrics HTTP/9.9\r\n\r\n", post):
        with served.metrics.open() as connection:
            connection.sendall(head)
            assert closes_within(connection, 40)
    page = served.metrics.ask("GET", "/metrics")
    assert (page.status, b"sparserow_serving_ready" in page.body) == (200, True)
    assert "Traceback" not in served.process.err
