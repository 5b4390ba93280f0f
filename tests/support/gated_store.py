"""A folder of checkpoints behind S3's protocol, whose files can be held back, so that a load stands still.

Servers open ``s3://`` where no roots are named, so that the tests need no scheme of their own. The store is read-only.
"""

from __future__ import annotations

import os
import re
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import fsspec

_DEADLINE_SEC = 300.0
_BUCKET = "gated"
_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


class GatedStore:
    """Serves a folder for the duration of a block; processes that are started in it find the store.

    Args:
        folder: what is served.

    Attributes:
        url: of the folder.
        paths: of the files that were asked for, in order.
        environment: what a process finds the store by.
    """

    def __init__(self, folder: Path) -> None:
        self.paths: list[str] = []
        self.folder = folder
        self._lock = threading.Lock()
        self._pattern: re.Pattern[str] | None = None
        self._free = 0
        self._is_open = threading.Event()
        self._is_met = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, self))
        self._server.daemon_threads = True
        self.url = f"s3://{_BUCKET}/ckpt"
        endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.environment = {**_CREDENTIALS, "AWS_ENDPOINT_URL": endpoint}
        self._before: dict[str, str | None] = {}
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> GatedStore:
        for name, value in self.environment.items():
            self._before[name] = os.environ.get(name)
            os.environ[name] = value
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
        for name, value in self._before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        self._server.shutdown()
        self._server.server_close()

    def hold(self, pattern: str, *, after: int = 0) -> None:
        """Holds back every file whose path has this pattern, but the first ``after`` that are asked for."""
        with self._lock:
            self._is_open.clear()
            self._is_met.clear()
            self._pattern, self._free = re.compile(pattern), after

    def until_met(self) -> None:
        """Returns when a file that is held back was asked for."""
        assert self._is_met.wait(_DEADLINE_SEC), "no file that is held back was asked for"

    def release(self) -> None:
        """Gives all files that were held back."""
        with self._lock:
            self._pattern = None
        self._is_open.set()

    def pass_by(self, path: str) -> None:
        """Blocks as long as a file is held back."""
        with self._lock:
            self.paths.append(path)
            if self._pattern is None or not self._pattern.search(path):
                return
            self._free -= 1
            if self._free >= 0:
                return
        self._is_met.set()
        self._is_open.wait(_DEADLINE_SEC)

    def listing(self, prefix: str) -> str:
        """The answer of ListObjectsV2 for what lies directly below a prefix."""
        where = self.folder / prefix.removeprefix("ckpt").strip("/")
        entries = []
        for each in sorted(where.iterdir()) if where.is_dir() else ():
            key = escape(prefix + each.name)
            if each.is_dir():
                entries.append(f"<CommonPrefixes><Prefix>{key}/</Prefix></CommonPrefixes>")
            else:
                facts = f"<Size>{each.stat().st_size}</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                entries.append(f'<Contents><Key>{key}</Key>{facts}<ETag>"0"</ETag></Contents>')
        head = f"<Name>{_BUCKET}</Name><IsTruncated>false</IsTruncated><KeyCount>{len(entries)}</KeyCount>"
        return f"<ListBucketResult>{head}{''.join(entries)}</ListBucketResult>"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, store: GatedStore, *arguments: Any, **named: Any) -> None:
        self._store = store
        super().__init__(*arguments, **named)

    def do_GET(self) -> None:
        try:
            self._answer()
        except OSError:  # the process that asked has ended
            self.close_connection = True

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._send(403, b"<Error><Code>AccessDenied</Code><Message>it is read-only</Message></Error>")

    def do_DELETE(self) -> None:
        self.do_PUT()

    def do_POST(self) -> None:
        self.do_PUT()

    def _answer(self) -> None:
        asked = urlsplit(self.path)
        path = unquote(asked.path).strip("/")
        if path == _BUCKET:
            prefix = parse_qs(asked.query).get("prefix", [""])[0]
            self._send(200, self._store.listing(prefix).encode())
            return
        if self.command == "GET":
            self._store.pass_by(asked.path)
        file = self._store.folder / path.removeprefix(f"{_BUCKET}/ckpt").strip("/")
        if not file.is_file():
            self._send(404, b"<Error><Code>NoSuchKey</Code><Message>there is none</Message></Error>")
            return
        data = file.read_bytes()
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if part is None:
            self._send(200, data)
            return
        begin, end = int(part[1]), min(int(part[2]) + 1, len(data))
        self._send(206, data[begin:end], f"bytes {begin}-{end - 1}/{len(data)}")

    def _send(self, status: int, body: bytes, content_range: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/xml")
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("ETag", '"0"')
        if content_range:
            self.send_header("Content-Range", content_range)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass
