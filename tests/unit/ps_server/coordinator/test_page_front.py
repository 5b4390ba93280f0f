"""The HTTP door of the page: what it answers to whom, its headers, and what a client may cost."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import sparserow as sr
from raw_http import Door, Reply, close_all, closes_within, read_reply, request
from sparserow.deploy.launch.security_files import add_token
from sparserow.proto.config.http_limits import HttpLimits
from sparserow.ps_server.coordinator.page.source import page_source
from stubbed_page import StubbedPage, large_status, stubbed_page

HOST = b"Host: server"


@pytest.fixture
def page() -> Iterator[StubbedPage]:
    with stubbed_page(large_status(2, 3)) as served:
        yield served


def door(page: StubbedPage) -> Door:
    return Door("127.0.0.1", page.port)


def ask(
    page: StubbedPage, method: str, path: str, *, host: str = "127.0.0.1", more: str = "", token: str = ""
) -> Reply:
    text = request(method, path, None, token).replace(HOST, f"Host: {host}{more}".encode())
    with door(page).open() as connection:
        connection.sendall(text)
        return read_reply(connection)


def header(reply: Reply, name: str) -> str:
    found = re.search(rf"(?im)^{name}: (.*?)\r?$", reply.head)
    return found[1] if found else ""


def test_the_policy_allows_the_script_and_the_style_of_the_page_alone(page: StubbedPage) -> None:
    reply = ask(page, "GET", "/")
    policy = header(reply, "content-security-policy")
    html = reply.body.decode()
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (text,) = re.findall(rf"(?s)<{tag}>(.*?)</{tag}>", html)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    for directive in ("default-src 'none'", "connect-src 'self'", "base-uri 'none'", "form-action 'none'"):
        assert directive in policy
    assert "frame-ancestors 'none'" in policy
    assert not re.findall(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)[a-z]", re.sub(r"(?m)^\s*//.*$", "", html))
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", html)
    assert not re.findall(r"\son\w+=|\sstyle=|<script\s|<link", html)


def test_each_reply_has_the_headers_that_bind_the_browser(page: StubbedPage) -> None:
    for path in ("/", "/status.json", "/none", "/favicon.ico"):
        reply = ask(page, "GET", path)
        assert header(reply, "x-frame-options") == "DENY"
        assert header(reply, "x-content-type-options") == "nosniff"
        assert header(reply, "referrer-policy") == "no-referrer"
        assert header(reply, "cache-control") == "no-store"
        assert not header(reply, "set-cookie")
        assert "access-control" not in reply.head.lower()


def test_figures_come_plain_or_compressed(page: StubbedPage) -> None:
    plain = ask(page, "GET", "/status.json")
    assert plain.document["status"]["tables"][0]["table"] == "ads/table-000"
    packed = ask(page, "GET", "/status.json?x=1", more="\r\nAccept-Encoding: gzip, br")
    assert header(packed, "content-encoding") == "gzip"
    assert b'"ads/table-000"' in gzip.decompress(packed.body)


@pytest.mark.parametrize(
    ("method", "path", "more", "status"),
    [
        ("HEAD", "/", "", 200),
        ("POST", "/", "", 405),
        ("PUT", "/status.json", "", 405),
        ("DELETE", "/status.json", "", 405),
        ("OPTIONS", "/status.json", "", 405),
        ("GET", "/metrics", "", 404),
        ("GET", "/../../etc/passwd", "", 404),
        ("GET", "//127.0.0.1/", "", 404),
        ("GET", "/page.js", "", 404),
        ("GET", "/status.json", "\r\nContent-Length: 5", 400),
        ("GET", "/status.json", "\r\nTransfer-Encoding: chunked", 400),
        ("GET", "/" + "a" * 5000, "", 400),
        ("GET", "/", "\r\nX-Long: " + "a" * 10_000, 400),
        ("GET", "/", "".join(f"\r\nX-{number}: a" for number in range(100)), 400),
    ],
)
def test_other_requests_are_refused(page: StubbedPage, method: str, path: str, more: str, status: int) -> None:
    with door(page).open() as connection:
        connection.sendall(request(method, path).replace(HOST, f"Host: 127.0.0.1{more}".encode()))
        head = b""
        while b"\r\n" not in head:
            head += connection.recv(4096)
    assert int(head.split()[1]) == status
    assert page.reads == 0, "nothing is read for it"


def test_a_foreign_name_of_this_host_is_refused_while_no_token_is_asked_for(page: StubbedPage) -> None:
    for host in ("127.0.0.1", f"127.0.0.1:{page.port}", "[::1]:9", "localhost:9", "page.localhost", "10.0.0.7"):
        assert ask(page, "GET", "/status.json", host=host).status == 200, host
    for host in ("evil.example", f"evil.example:{page.port}", "127.0.0.1.evil.example", "", "[::1", "localhost.evil"):
        assert ask(page, "GET", "/status.json", host=host).status == 421, host


def test_a_token_is_asked_for_and_its_rights_count(page: StubbedPage, tmp_path: Path) -> None:
    page.status.tables.add(id=9, namespace="feed", name="item", dim=4)  # type: ignore[union-attr]
    tokens = tmp_path / "tokens.yaml"
    shown = {name: add_token(tokens, name, "serve-read", of) for name, of in (("all", ()), ("ads", ("ads",)))}
    (tmp_path / "security.yaml").write_text("tokens: tokens.yaml\n")
    sr.use_security(tmp_path / "security.yaml")
    try:
        assert b'name="sparserow-token" content="needed"' in ask(page, "GET", "/").body
        for token in ("", "wrong", shown["all"] + "x"):
            reply = ask(page, "GET", "/status.json", token=token)
            assert (reply.status, header(reply, "www-authenticate")) == (401, "Bearer")
            assert list(reply.document) == ["error"]
        assert page.reads == 0, "nothing is read for a stranger"
        every = ask(page, "GET", "/status.json", token=shown["all"], host="evil.example").document
        assert [each["table"] for each in every["status"]["tables"]][-1] == "feed/item"
        ads = ask(page, "GET", "/status.json", token=shown["ads"]).document
        assert {each["table"].partition("/")[0] for each in ads["status"]["tables"]} == {"ads"}
        assert ads["namespaces"] == ["ads"]
    finally:
        sr.use_security(None)
    assert b'name="sparserow-token" content="none"' in ask(page, "GET", "/").body


def test_slow_clients_and_many_connections_leave_room_for_others() -> None:
    limits = HttpLimits(connections=8, head_sec=1.0)
    with stubbed_page(large_status(1, 1), limits=limits) as page:
        slow = door(page).open()
        slow.sendall(b"GET / HTTP/1.1\r\nHost: a\r\nX-Sl")
        assert closes_within(slow, 30)
        idle = [door(page).open() for _ in range(30)]
        other = door(page).ask("GET", "/", source="127.0.0.2")
        assert other.status == 421, "it was answered"
        close_all(idle)
        assert ask(page, "GET", "/status.json").status == 200


def test_the_page_is_small_and_whole() -> None:
    source = page_source()
    assert len(source.html) < 64 << 10
    assert source.html.replace(b'content="none"', b'content="needed"') == source.asking
