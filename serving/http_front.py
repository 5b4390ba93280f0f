"""HTTP/JSON for curl and for languages without gRPC: a thread of its own, one thread per connection.

GET  /v1/health   200 when this process is ready, else 503; problems only for who has a token, where they are asked for
GET  /v1/models   versions and aliases
POST /v1/lookup   {"model": "ctr", "tables": {"user": [1, 2]}, "routing_key": "u7", "deadline_ms": 20}

Where tokens are asked for: ``Authorization: Bearer TOKEN``.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ..proto.errors import FailedPrecondition, InvalidArgument, SparserowError
from ..proto.security import bearer_token, process_security, server_context
from .lookup import DEADLINE_SEC, LocalLookup, checked_keys
from .models import ServedModels

_STATUS = {"InvalidArgument": 400, "NotFound": 404, "FailedPrecondition": 409, "Unavailable": 503}
_MOST_BYTES = 64 << 20
_SOCKET_SEC = 30.0
_KNOWN = {"model", "tables", "routing_key", "deadline_ms"}


class HttpFront:
    """Listens until ``close``.

    Args:
        host, port: 0 lets the system choose; ``port`` afterwards says which.
        lookup: answers.
        models: what is served.
    """

    def __init__(self, host: str, port: int, lookup: LocalLookup, models: ServedModels) -> None:
        routes: dict[tuple[str, str], Callable[[Any, str], tuple[int, Any]]] = {
            ("GET", "/v1/health"): lambda _, token: _health(models, token),
            ("GET", "/v1/models"): lambda _, token: (200, _models(models, token)),
            ("POST", "/v1/lookup"): lambda body, token: (200, _lookup(lookup, body, token)),
        }

        class Handler(_Handler):
            served = routes

        self._server = _HttpServer((host, port), Handler)
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="sparserow-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)


class _HttpServer(ThreadingHTTPServer):
    """With the process's certificate, where it has one; the handshake is the connection's own thread's."""

    daemon_threads = True

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(_SOCKET_SEC)
        context = server_context(process_security())
        if context is not None:
            try:
                request = context.wrap_socket(request, server_side=True)
            except OSError:  # no TLS, or not the client's certificate that is wanted
                return
        super().finish_request(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    served: dict[tuple[str, str], Callable[[Any, str], tuple[int, Any]]]
    protocol_version = "HTTP/1.1"
    timeout = _SOCKET_SEC

    def do_GET(self) -> None:
        self._answer("GET", None)

    def do_POST(self) -> None:
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            self._send(411, {"error": "Content-Length: is missing"}, ends=True)
            return
        if not 0 <= length <= _MOST_BYTES:
            self._send(413, {"error": f"Content-Length: {length}; allowed: [0, {_MOST_BYTES}]"}, ends=True)
            return
        data = self.rfile.read(length)
        try:
            body = json.loads(data)
        except ValueError as error:
            self._send(400, {"error": f"the body is no JSON: {error}"})
            return
        self._answer("POST", body)

    def _answer(self, method: str, body: Any) -> None:
        route = self.served.get((method, self.path))
        if route is None:
            known = ", ".join(f"{verb} {path}" for verb, path in self.served)
            self._send(404, {"error": f"{method} {self.path}: is not served; served: {known}"})
            return
        try:
            token = bearer_token([("authorization", self.headers.get("Authorization", ""))])
            status, reply = route(body, token)
        except SparserowError as error:
            status, reply = _STATUS.get(error.code, 500), {"error": str(error), "code": error.code}
        self._send(status, reply)

    def _send(self, status: int, reply: Any, *, ends: bool = False) -> None:
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if ends:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Requests are not logged."""


def _health(models: ServedModels, token: str) -> tuple[int, Any]:
    ready = models.is_ready
    try:
        process_security().grant_of(token)
    except FailedPrecondition:  # a probe has none; who has none learns no names and paths
        return (200 if ready else 503), {"ready": ready}
    return (200 if ready else 503), {"ready": ready, "problems": models.problems()}


def _models(models: ServedModels, token: str) -> Any:
    process_security().grant_of(token)
    book = models.book()
    return {
        "versions": [
            {"model": model, "version": version, "ready": served.is_ready, "tables": sorted(served.loaded.tables)}
            for (model, version), served in sorted(book.versions.items())
        ],
        "aliases": [
            {"model": model, "alias": which, "version": alias.version, "canary": alias.canary}
            for (model, which), alias in sorted(book.aliases.items())
        ],
    }


def _lookup(lookup: LocalLookup, body: Any, token: str) -> Any:
    if not isinstance(body, dict) or not isinstance(body.get("tables"), dict):
        raise InvalidArgument('the body must be {"model": NAME, "tables": {TABLE: [KEY, ...]}}')
    unknown = sorted(set(body) - _KNOWN)
    if unknown:
        raise InvalidArgument(f"{unknown[0]}: unknown key; known keys: {', '.join(sorted(_KNOWN))}")
    model, routing_key = body.get("model"), body.get("routing_key", "")
    if not isinstance(model, str) or not isinstance(routing_key, str):
        raise InvalidArgument("model and routing_key must be strings")
    deadline_ms = body.get("deadline_ms", DEADLINE_SEC * 1000)
    if isinstance(deadline_ms, bool) or not isinstance(deadline_ms, int | float) or not 1 <= deadline_ms <= 600_000:
        raise InvalidArgument(f"deadline_ms: {deadline_ms!r} is not allowed; allowed: [1, 600000]")
    keys = {table: checked_keys(keys, table) for table, keys in body["tables"].items()}
    answer = lookup.lookup(model, keys, routing_key, token=token, deadline_sec=deadline_ms / 1000)
    return {
        "version": answer.version,
        "dense_version": answer.dense_version,
        "problems": answer.problems,
        "tables": {
            rows.table: {
                "rows": rows.rows.tolist(),
                "found": rows.found.tolist(),
                "answered": rows.answered.tolist(),
                "versions": rows.versions.tolist(),
            }
            for rows in answer.tables
        },
    }
