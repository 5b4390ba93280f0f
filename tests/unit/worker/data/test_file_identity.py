"""What tells that a file of training data is the one that was read before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sparserow.worker.data.storage import identity_of


class Site(ThreadingHTTPServer):
    """Serves one file, and tells of its contents what the test says."""

    daemon_threads = True
    told: dict[str, str] = {}  # noqa: RUF012 - of one test


class Handler(BaseHTTPRequestHandler):
    server: Site

    def do_HEAD(self) -> None:
        self.send_response(200)
        for name, value in {"Content-Length": "100", "Accept-Ranges": "bytes", **self.server.told}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def site() -> Iterator[Site]:
    with Site(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_a_file_of_a_web_server_is_known_by_what_the_server_tells_of_its_contents(site: Site) -> None:
    pytest.importorskip("aiohttp")
    url = f"http://127.0.0.1:{site.server_address[1]}/day.csv"
    assert identity_of(url) == "", "an address says nothing of the contents"
    site.told = {"ETag": '"one"'}
    first = identity_of(url)
    assert first
    assert identity_of(url) == first
    site.told = {"ETag": '"two"'}
    assert identity_of(url) not in ("", first)
