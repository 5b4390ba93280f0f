"""HTTP spoken by hand over a socket, for requests that no client library would send."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Door:
    """Where a server listens; ``ca`` is the authority of its certificate, None for plain HTTP."""

    host: str
    port: int
    ca: Path | None = None

    def open(self, source: str = "127.0.0.1", identity: tuple[str, str] | None = None) -> Any:
        """A connection, after the TLS handshake where there is one."""
        raw = socket.create_connection((self.host, self.port), 60.0, (source, 0))
        if self.ca is None:
            return raw
        context = ssl.create_default_context(cafile=str(self.ca))
        if identity is not None:
            context.load_cert_chain(*identity)
        return context.wrap_socket(raw, server_hostname=self.host)

    def ask(self, method: str, path: str, body: bytes | None = None, token: str = "", **options: Any) -> Reply:
        """The reply to one request on a connection of its own."""
        with self.open(**options) as connection:
            connection.sendall(request(method, path, body, token))
            return read_reply(connection)


@dataclass(frozen=True)
class Reply:
    """A reply; ``body`` is as it came."""

    status: int
    head: str
    body: bytes

    @property
    def document(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


def request(method: str, path: str, body: bytes | None = None, token: str = "", length: int | None = None) -> bytes:
    """A request's bytes; ``length`` announces another length than the body has."""
    lines = [f"{method} {path} HTTP/1.1", "Host: server"]
    if token:
        lines.append(f"Authorization: Bearer {token}")
    if body is not None:
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b"")


def read_reply(connection: Any) -> Reply:
    """Reads one reply; fails when the connection ends before it is whole."""
    data = b""
    while b"\r\n\r\n" not in data:
        chunk = connection.recv(65536)
        assert chunk, f"the connection ended after {data!r}"
        data += chunk
    head, _, body = data.partition(b"\r\n\r\n")
    text = head.decode("latin-1")
    length = re.search(r"(?i)^content-length: (\d+)", text, re.MULTILINE)
    wanted = int(length[1]) if length else 0
    while len(body) < wanted:
        chunk = connection.recv(65536)
        assert chunk, "the connection ended within the body"
        body += chunk
    return Reply(int(text.split()[1]), text, body)


def push_bytes(connection: Any, data: bytes, pieces: int = 64) -> int:
    """Sends as much as the server takes; the bytes that went out before it closed the connection."""
    sent = 0
    with contextlib.suppress(OSError):
        for _ in range(pieces):
            connection.sendall(data)
            sent += len(data)
    return sent


def closes_within(connection: Any, seconds: float) -> bool:
    """Whether the server closes the connection in time; what it says before is read and dropped."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        connection.settimeout(left)
        try:
            if not connection.recv(65536):
                return True
        except TimeoutError:
            return False
        except OSError:
            return True
    return False


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had since :func:`reset_peak`."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def reset_peak(pid: int) -> int:
    """Lets :func:`peak_bytes` begin anew; the memory that the process has now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak_bytes(pid)


def close_all(connections: Sequence[Any]) -> None:
    """Closes connections, whatever state they are in."""
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.close()
