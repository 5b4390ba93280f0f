"""Channels of gRPC that show the token and the certificate of an identity to the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from ..grpc_status import CHANNEL_OPTIONS
from .security import TOKEN_HEADER, Security, process_security


def channel_credentials(security: Security) -> grpc.ChannelCredentials:
    """Returns credentials of a channel that trusts ``security.authorities``."""
    return grpc.ssl_channel_credentials(
        root_certificates=security.authorities.encode(),
        private_key=security.key.encode() or None,
        certificate_chain=security.certificate.encode() or None,
    )


def open_channel(address: str, security: Security | None = None, *, options: Any = CHANNEL_OPTIONS) -> grpc.Channel:
    """Returns a channel to ``HOST:PORT`` that shows the caller's token or certificate.

    Args:
        address: the address of the server, ``HOST:PORT``.
        security: the identity to show; None stands for that of the process, whose token is read at each call.
        options: the channel options of gRPC.
    """
    shown = security if security is not None else process_security()
    if shown.authorities:
        channel = grpc.secure_channel(address, channel_credentials(shown), options=options)
    else:
        channel = grpc.insecure_channel(address, options=options)
    return grpc.intercept_channel(channel, _ShowsToken(_token_source(security)))


def open_aio_channel(address: str, security: Security | None = None, *, options: Any = CHANNEL_OPTIONS) -> Any:
    """Returns a channel of asyncio, with the arguments of :func:`open_channel`."""
    shown = security if security is not None else process_security()
    token = _token_source(security)
    interceptors = [_ShowsTokenInUnary(token), _ShowsTokenInStream(token)]
    if shown.authorities:
        return grpc.aio.secure_channel(address, channel_credentials(shown), options=options, interceptors=interceptors)
    return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)


def _token_source(security: Security | None) -> Callable[[], str]:
    return (lambda: process_security().token) if security is None else (lambda: security.token)


class _CallDetails(grpc.ClientCallDetails):  # type: ignore[misc]
    """The details of another call, with the token added."""

    def __init__(self, details: Any, token: str) -> None:
        self.method = details.method
        self.timeout = details.timeout
        self.credentials = details.credentials
        self.wait_for_ready = details.wait_for_ready
        self.compression = getattr(details, "compression", None)
        self.metadata = [*(details.metadata or ()), (TOKEN_HEADER, f"Bearer {token}")]


class _ShowsToken(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[misc]
    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        token = self._token()
        return continuation(_CallDetails(details, token) if token else details, request)

    intercept_unary_stream = intercept_unary_unary


class _AioInterceptor:
    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    def shown(self, details: Any) -> Any:
        token = self._token()
        if token:
            metadata = grpc.aio.Metadata(*(details.metadata or ()))
            metadata.add(TOKEN_HEADER, f"Bearer {token}")
            return details._replace(metadata=metadata)
        return details


class _ShowsTokenInUnary(_AioInterceptor, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return await continuation(self.shown(details), request)


class _ShowsTokenInStream(_AioInterceptor, grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[misc]
    async def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return await continuation(self.shown(details), request)
