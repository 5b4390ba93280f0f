"""Channels of gRPC that show the token and the certificate of an identity to the server, as its files have them now."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import grpc

from ..grpc_status import CHANNEL_OPTIONS
from .fresh_security import FreshSecurity, fresh
from .security import TOKEN_HEADER, Security

_LONGEST_CALL_SEC = 86400.0
_closing: set[asyncio.Task[None]] = set()


class _Channel:
    """A channel that opens its connection anew when the certificates of its identity have changed.

    gRPC's own channels keep the certificates of their beginning. Calls under way stay on the connection that they were
    made on, such as a stream of hours. It is closed with the channel, or at a change a day after it was replaced.

    Args:
        address: the address of the server, ``HOST:PORT``.
        security: the identity to show; None stands for that of the process.
        options: the channel options of gRPC.
        has_token: whether calls show the token of the identity.
        is_tls: whether the connection is one of TLS; None: where the identity has authorities to trust.
    """

    _kind: Any = grpc  # the module with insecure_channel and secure_channel

    def __init__(
        self,
        address: str,
        security: FreshSecurity | Security | None = None,
        *,
        options: Any = CHANNEL_OPTIONS,
        has_token: bool = True,
        is_tls: bool | None = None,
    ) -> None:
        self._address = address
        self._security = fresh(security)
        self._options = options
        self._has_token = has_token
        self._is_tls = is_tls
        self._lock = threading.Lock()
        self._is_closed = False
        self._shown = self._to_show()
        self._inner = self._open(self._shown)
        self._formers: list[tuple[float, Any]] = []  # when each was replaced, and the channel

    def _to_show(self) -> tuple[str, str, str]:
        security = self._security.now
        return security.authorities, security.key, security.certificate

    def _open(self, shown: tuple[str, str, str]) -> Any:
        if not (shown[0] if self._is_tls is None else self._is_tls):
            return self._kind.insecure_channel(self._address, options=self._options)
        authorities, key, certificate = (text.encode() or None for text in shown)
        credentials = grpc.ssl_channel_credentials(authorities, key, certificate)
        return self._kind.secure_channel(self._address, credentials, options=self._options)

    def now(self) -> Any:
        """Returns the channel of gRPC with the present certificates.

        Raises:
            ValueError: this channel is closed.
        """
        with self._lock:
            self._check_open()
            shown = self._to_show()
            if shown != self._shown:
                moment = time.monotonic()
                for replaced_at, former in list(self._formers):
                    if moment - replaced_at > _LONGEST_CALL_SEC:
                        self._formers.remove((replaced_at, former))
                        self._close(former)
                self._formers.append((moment, self._inner))
                self._inner, self._shown = self._open(shown), shown
            return self._inner

    def method_of(self, inner: Any, kind: str, method: tuple[Any, ...], more: dict[str, Any]) -> Any:
        """Returns the callable of a method, which a channel of gRPC that is closed would end the process for.

        Raises:
            ValueError: this channel is closed.
        """
        with self._lock:
            self._check_open()
            return getattr(inner, kind)(*method, **more)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError(f"{self._address}: the channel is closed")

    def _close_all(self) -> list[Any]:
        """Makes later calls fail; returns the channels of gRPC that are to be closed."""
        with self._lock:
            self._is_closed = True
            return [*(former for _, former in self._formers), self._inner]

    def metadata(self, given: Sequence[tuple[str, str]] | None) -> tuple[tuple[str, str], ...]:
        """Returns the metadata of a call, with the present token."""
        token = self._security.now.token if self._has_token else ""
        return (*(given or ()), *(((TOKEN_HEADER, f"Bearer {token}"),) if token else ()))

    def look(self) -> None:
        """Reads the files of the identity again when they have changed."""

    def _close(self, inner: Any) -> None:
        inner.close()

    # What generated stubs ask a channel for.

    def unary_unary(self, *method: Any, **more: Any) -> _Method:
        return _Method(self, "unary_unary", method, more)

    def unary_stream(self, *method: Any, **more: Any) -> _Method:
        return _Method(self, "unary_stream", method, more)

    def stream_stream(self, *method: Any, **more: Any) -> _Method:
        return _Method(self, "stream_stream", method, more)


class _Method:
    """One method of the server; a call has the arguments and the result of gRPC's own."""

    def __init__(self, channel: _Channel, kind: str, method: tuple[Any, ...], more: dict[str, Any]) -> None:
        self._channel = channel
        self._kind = kind
        self._method = (method, more)
        self._made: tuple[Any, Any] = (None, None)  # of a channel of gRPC, that channel's callable

    def _call(self) -> Any:
        self._channel.look()
        inner, (made_of, call) = self._channel.now(), self._made
        if inner is not made_of:
            method, more = self._method
            call = self._channel.method_of(inner, self._kind, method, more)
            self._made = (inner, call)
        return call

    def __call__(self, request: Any, timeout: float | None = None, metadata: Any = None, **more: Any) -> Any:
        return self._call()(request, timeout=timeout, metadata=self._channel.metadata(metadata), **more)

    def future(self, request: Any, timeout: float | None = None, metadata: Any = None, **more: Any) -> Any:
        return self._call().future(request, timeout=timeout, metadata=self._channel.metadata(metadata), **more)


class SecureChannel(_Channel):
    """A synchronous channel; see :class:`_Channel`. It has to be closed, or used in a ``with`` statement.

    Each call looks at the files of the identity.
    """

    def look(self) -> None:
        self._security.look()

    def close(self) -> None:
        """Closes the connection; later calls raise ValueError, and those under way are cancelled."""
        for inner in self._close_all():
            inner.close()

    def __enter__(self) -> SecureChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AioSecureChannel(_Channel):
    """A channel of asyncio; see :class:`_Channel`.

    It reads no files: a process with an event loop follows those of its identity beside it (``fresh_security``).
    """

    _kind = grpc.aio

    def _close(self, inner: Any) -> None:
        task = asyncio.get_running_loop().create_task(inner.close())
        _closing.add(task)  # the reference keeps the task alive
        task.add_done_callback(_closing.discard)

    async def close(self) -> None:
        """Closes the connection, and cancels the calls under way."""
        for inner in self._close_all():
            await inner.close()
