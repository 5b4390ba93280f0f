"""The HTTP/JSON front, for curl and for languages without gRPC.

GET  /v1/health   200 when this process is ready, else 503; problems only for a caller with a token, if there are tokens
GET  /v1/models   versions and aliases of the namespaces that the token reaches
POST /v1/lookup   {"model": "ctr", "tables": {"user": [1, 2]}, "routing_key": "u7", "deadline_ms": 20}; in place of keys
                  there may be {"feature": "user", "values": ["ada"]}, of which the version's feature makes them

A token is sent as ``Authorization: Bearer TOKEN``. It is checked before any part of the body is read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..proto.config.http_limits import HttpLimits
from ..proto.errors import InvalidArgument, PermissionDenied, SparserowError, not_allowed
from ..proto.process.cores import available_cores
from ..proto.process.fair_memory import FairMemory
from ..proto.published.model_names import parse_model
from ..proto.security.security import TokenEntry, bearer_token, process_security, reaches_namespace
from .json_bounds import parse_json
from .lookup import DEADLINE_SEC, MOST_KEYS, LocalLookup, checked_keys
from .version_features import FEATURE_THREADS, FeatureValues
from .versions import ServedModels

if TYPE_CHECKING:
    from ..proto.process.http_exchange import HttpExchange

_STATUS = {
    "InvalidArgument": 400,
    "PermissionDenied": 403,
    "NotFound": 404,
    "FailedPrecondition": 409,
    "Unavailable": 503,
}
_KNOWN = {"model", "tables", "routing_key", "deadline_ms"}
_THREADS = min(32, available_cores() + 4)
_VALUE_BYTES = 25  # the longest text of a weight, with its comma
_KEY_BYTES = 40  # the longest text of a key's "found", "answered" and "versions" and the brackets of its row
_FIXED_BYTES = 4096  # room for names and problems


class Refused(Exception):  # noqa: N818 - as the taxonomy's
    """Raised for a request that is answered with an HTTP status of its own.

    Args:
        status: the HTTP status.
        message: the text of the error.
        ends: whether the connection is closed, because the body of the request is not read.
        allow: the methods that the path takes.
    """

    def __init__(self, status: int, message: str, *, ends: bool = False, allow: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.ends = ends
        self.allow = allow


@dataclass(frozen=True)
class _LookupBody:
    """A parsed lookup request."""

    model: str
    tables: dict[str, NDArray[np.uint64]]
    routing_key: str
    deadline_sec: float
    values: dict[str, FeatureValues]  # of which the version's features make the keys of further tables


class HttpFront:
    """Answers HTTP requests. It belongs to one event loop; parsing, reading rows and encoding run in threads.

    Args:
        lookup: looks rows up.
        models: the versions that this process serves.
        limits: the limits of bodies, replies and memory.
    """

    def __init__(self, lookup: LocalLookup, models: ServedModels, limits: HttpLimits) -> None:
        self._lookup = lookup
        self._models = models
        self._limits = limits
        self._memory = FairMemory(limits.memory_bytes)
        self._threads = ThreadPoolExecutor(_THREADS, "sparserow-http")
        self._feature_threads = ThreadPoolExecutor(FEATURE_THREADS, "sparserow-http-features")
        self._routes: dict[tuple[str, str], Callable[[HttpExchange, TokenEntry, str], Awaitable[None]]] = {
            ("GET", "/v1/models"): self._answer_models,
            ("POST", "/v1/lookup"): self._answer_lookup,
        }

    async def answer(self, exchange: HttpExchange) -> None:
        """Answers one request."""
        token = bearer_token([("authorization", exchange.headers.get("Authorization", ""))])
        has_body = exchange.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in exchange.headers
        try:
            try:
                grant = process_security().grant_of(token)
            except PermissionDenied as refusal:
                await self._answer_stranger(exchange, refusal, ends=has_body)
                return
            if (_verb(exchange), exchange.path) == ("GET", "/v1/health"):
                problems = {**self._models.problems(), **self._models.sync_problems()}
                await self._answer_health(exchange, problems=problems)
                return
            route = self._routes.get((_verb(exchange), exchange.path))
            if route is None:
                allowed = [verb for verb, path in (("GET", "/v1/health"), *self._routes) if path == exchange.path]
                if allowed:
                    raise Refused(405, f"{exchange.path} takes {', '.join(allowed)}", ends=has_body, allow=allowed)
                raise Refused(404, f"{exchange.method} {exchange.path} is not served; served: {self._served}")
            await route(exchange, grant, token)
        except Refused as refused:
            headers = {"Allow": ", ".join(refused.allow)} if refused.allow else {}
            data = json.dumps({"error": str(refused)}).encode()
            await exchange.send(refused.status, data, "application/json", ends=refused.ends, headers=headers)
        except SparserowError as error:
            await _send(exchange, _STATUS.get(error.code, 500), {"error": str(error), "code": error.code})

    @property
    def _served(self) -> str:
        return ", ".join(f"{verb} {path}" for verb, path in (("GET", "/v1/health"), *self._routes))

    async def _answer_stranger(self, exchange: HttpExchange, refusal: PermissionDenied, *, ends: bool) -> None:
        """Answers a peer without a valid token.

        Such a peer learns whether the process is ready, for probes, but no names and no paths.
        """
        if (_verb(exchange), exchange.path) == ("GET", "/v1/health"):
            await self._answer_health(exchange)
        elif (_verb(exchange), exchange.path) in self._routes:
            await _send(exchange, 401, {"error": str(refusal), "code": refusal.code}, ends=ends)
        else:
            await _send(exchange, 404, {"error": "this path is not served"}, ends=ends)

    async def _answer_health(self, exchange: HttpExchange, **more: Any) -> None:
        ready = self._models.is_ready
        await _send(exchange, 200 if ready else 503, {"ready": ready, **more})

    async def _answer_models(self, exchange: HttpExchange, grant: TokenEntry, _: str) -> None:
        await _send(exchange, 200, _models(self._models, grant))

    async def _answer_lookup(self, exchange: HttpExchange, grant: TokenEntry, token: str) -> None:
        length = self._body_length(exchange)
        client = grant.name if token else exchange.peer
        async with self._memory.charged(client, self._limits.body_cost(length)):
            asked = await self._in_thread(partial(_parsed, await exchange.read(length)))
            if asked.values:
                make = partial(self._with_keys, asked, token)
                asked = await asyncio.get_running_loop().run_in_executor(self._feature_threads, make)
        reply_bytes = await self._in_thread(partial(self._reply_bytes, asked, token))
        async with self._memory.charged(client, self._limits.reply_cost(reply_bytes)):
            data = await self._in_thread(partial(self._looked_up, asked, token))
            await exchange.send(200, data, "application/json")

    def _body_length(self, exchange: HttpExchange) -> int:
        if exchange.headers.get("Content-Encoding", "identity") != "identity":
            raise Refused(415, "Content-Encoding: it is not allowed; send the body without encoding", ends=True)
        text = exchange.headers.get("Content-Length", "")
        if not text.isdecimal() or "Transfer-Encoding" in exchange.headers:
            raise Refused(411, "Content-Length: it is missing", ends=True)
        most = self._limits.body_bytes
        if len(text) > 18 or int(text) > most:
            raise Refused(413, f"Content-Length: {text[:18]}; allowed: [0, {most}] (limits.http.body_bytes)", ends=True)
        return int(text)

    def _reply_bytes(self, asked: _LookupBody, token: str) -> int:
        """Returns an upper bound of the size of the reply, in bytes.

        Raises:
            Refused: the bound exceeds the limit; the text has the number of keys that fit.
        """
        dims = self._lookup.dims(asked.model, list(asked.tables), asked.routing_key, token=token)
        count = sum(len(keys) for keys in asked.tables.values())
        by_key = {table: _KEY_BYTES + _VALUE_BYTES * dim for table, dim in dims.items()}
        needed = _FIXED_BYTES + sum(len(keys) * by_key[table] for table, keys in asked.tables.items())
        most = self._limits.reply_bytes
        if needed > most:
            fits = max(0, most - _FIXED_BYTES) * count // (needed - _FIXED_BYTES)
            raise Refused(
                413,
                f"{count} keys: the reply may be longer than {most} bytes (limits.http.reply_bytes); "
                f"of these tables at most {fits} keys fit in a lookup",
            )
        return needed

    def _with_keys(self, asked: _LookupBody, token: str) -> _LookupBody:
        """Returns the request with the keys of its values, of the version whose features made them."""
        model, tables = asked.model, dict(asked.tables)
        for table, values in asked.values.items():
            version, tables[table] = self._lookup.keys(model, values, asked.routing_key, token=token)
            model = f"{parse_model(model)[0]}@{version}"
        return replace(asked, model=model, tables=tables, values={})

    def _looked_up(self, asked: _LookupBody, token: str) -> bytes:
        answer = self._lookup.lookup(
            asked.model, asked.tables, asked.routing_key, token=token, deadline_sec=asked.deadline_sec
        )
        tables = {
            rows.table: {
                "rows": rows.rows.tolist(),
                "found": rows.found.tolist(),
                "answered": rows.answered.tolist(),
                "versions": rows.versions.tolist(),
            }
            for rows in answer.tables
        }
        reply = {"version": answer.version, "dense_version": answer.dense_version, "problems": answer.problems}
        return json.dumps({**reply, "tables": tables}).encode()

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def _verb(exchange: HttpExchange) -> str:
    """Returns the method whose route answers: a HEAD is answered as a GET, without its body."""
    return "GET" if exchange.method == "HEAD" else exchange.method


async def _send(exchange: HttpExchange, status: int, reply: Any, *, ends: bool = False) -> None:
    await exchange.send(status, json.dumps(reply).encode(), "application/json", ends=ends)


def _models(models: ServedModels, grant: TokenEntry) -> Any:
    book = models.book()
    versions = {
        name: served
        for name, served in sorted(book.versions.items())
        if reaches_namespace(grant, served.loaded.namespace)
    }
    reached = {model for model, _ in versions}
    return {
        "versions": [
            {"model": model, "version": version, "ready": served.is_ready, "tables": sorted(served.loaded.tables)}
            for (model, version), served in versions.items()
        ],
        "aliases": [
            {"model": model, "alias": which, "version": alias.version, "canary": alias.canary}
            for (model, which), alias in sorted(book.aliases.items())
            if model in reached or grant.namespaces is None
        ],
    }


def _parsed(data: bytes) -> _LookupBody:
    body = parse_json(data)
    if not isinstance(body, dict) or not isinstance(body.get("tables"), dict):
        raise InvalidArgument(
            'the body must be {"model": NAME, "tables": {TABLE: [KEY, ...]}}; in place of keys there may be '
            '{"feature": NAME, "values": [VALUE, ...]}'
        )
    unknown = sorted(set(body) - _KNOWN)
    if unknown:
        raise InvalidArgument(f"{unknown[0]}: unknown key; known keys: {', '.join(sorted(_KNOWN))}")
    model, routing_key = body.get("model"), body.get("routing_key", "")
    if not isinstance(model, str) or not isinstance(routing_key, str):
        raise InvalidArgument("model and routing_key must be strings")
    deadline_ms = body.get("deadline_ms", DEADLINE_SEC * 1000)
    if isinstance(deadline_ms, bool) or not isinstance(deadline_ms, int | float) or not 1 <= deadline_ms <= 600_000:
        raise not_allowed("deadline_ms", deadline_ms, "[1, 600000]")
    given = body["tables"]
    keys = {table: checked_keys(keys, table) for table, keys in given.items() if not isinstance(keys, dict)}
    values = {table: _values(asked, table) for table, asked in given.items() if isinstance(asked, dict)}
    return _LookupBody(model, keys, routing_key, deadline_ms / 1000, values)


def _values(asked: dict[str, Any], table: str) -> FeatureValues:
    unknown = sorted(set(asked) - {"feature", "values"})
    if unknown:
        raise InvalidArgument(f"table {table!r}: {unknown[0]}: unknown key; known keys: feature, values")
    values = FeatureValues.checked(asked.get("feature"), asked.get("values"), f"table {table!r}")
    if len(values) > MOST_KEYS:
        raise InvalidArgument(f"table {table!r}: {len(values)} values; allowed: at most {MOST_KEYS} in a call")
    return values
