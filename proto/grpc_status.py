"""The error taxonomy over gRPC: the number travels as trailing metadata, the status code is its nearest kin."""

from __future__ import annotations

import grpc

from .errors import DeadlineExceeded, Internal, InvalidArgument, SparserowError, Unavailable, error_of

CODE_KEY = "sparserow-code"
LEADER_KEY = "sparserow-leader"
# Proxies from the environment are for the web, not for a cluster's own ports; a taken port is an error.
# A peer that is back is found within a second or two, however long it was away: leases are counted in seconds. The
# least reconnect back-off is, for all its name, how long an attempt may take: a busy peer may not greet at once. A
# connection whose packets stay without acknowledgement is given up after 10 s: by itself TCP tries again as late as
# it was silent before, so 10 s later when a cable was out for as long. (With a keepalive time gRPC sets
# TCP_USER_TIMEOUT to the keepalive timeout; its pings, of which servers bear few, are an hour apart.)
_SILENCE_MS = 10_000
# A server ends a connection that has not finished TLS and HTTP/2's greeting in time, and one without a call for long.
# Connections have no greatest age: Load and Dump are streams of hours.
_HANDSHAKE_MS = 5_000
_IDLE_MS = 600_000
# What a cluster says of all its tables grows with them: gRPC's own bound of 4 MiB is reached at some thousands.
_MESSAGE_BYTES = 256 << 20
CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 3_600_000),
    ("grpc.keepalive_timeout_ms", _SILENCE_MS),
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    # A new channel makes its own attempt; from the shared pool it takes the refusal that an older one waits out.
    ("grpc.use_local_subchannel_pool", 1),
)
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_timeout_ms", _SILENCE_MS),
    ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
    ("grpc.max_connection_idle_ms", _IDLE_MS),
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
)

_STATUS: dict[str, grpc.StatusCode] = {
    "InvalidArgument": grpc.StatusCode.INVALID_ARGUMENT,
    "NotFound": grpc.StatusCode.NOT_FOUND,
    "FailedPrecondition": grpc.StatusCode.FAILED_PRECONDITION,
    "StaleRoute": grpc.StatusCode.ABORTED,
    "Fenced": grpc.StatusCode.ABORTED,
    "Unavailable": grpc.StatusCode.UNAVAILABLE,
    "DeadlineExceeded": grpc.StatusCode.DEADLINE_EXCEEDED,
    "ResourceExhausted": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "DataLoss": grpc.StatusCode.DATA_LOSS,
    "Internal": grpc.StatusCode.INTERNAL,
}


class NotLeader(Unavailable):
    """Another coordinator leads; ``leader`` is its address, empty where none is known."""

    def __init__(self, message: str, leader: str) -> None:
        super().__init__(message)
        self.leader = leader


def status_of_error(error: SparserowError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Status code, message and trailing metadata that carry ``error``."""
    metadata: tuple[tuple[str, str], ...] = ((CODE_KEY, str(error.number)),)
    if isinstance(error, NotLeader):
        metadata += ((LEADER_KEY, error.leader),)
    return _STATUS[error.code], str(error), metadata


def leader_of_status(error: grpc.RpcError) -> str | None:
    """The leader that a coordinator names which does not lead (empty: it knows none); None of any other error."""
    return next((str(value) for key, value in error.trailing_metadata() or () if key == LEADER_KEY), None)


def error_of_status(error: grpc.RpcError, peer: str, *, remedy: str = "") -> SparserowError:
    """The exception behind a failed call.

    Args:
        error: of a synchronous or an asyncio call.
        peer: what the call was for, such as ``coordinator 127.0.0.1:7000``.
        remedy: ends the message when the peer cannot be reached, such as ``; start it with ...``.
    """
    details = (error.details() or "").strip()
    for key, value in error.trailing_metadata() or ():
        if key == CODE_KEY:
            return error_of(int(value), details)
    code = error.code()
    if code == grpc.StatusCode.UNAVAILABLE:
        return Unavailable(f"{peer} cannot be reached: {_last_cause(details)}{remedy}")
    if code == grpc.StatusCode.CANCELLED:  # we cancel no call: a server does that which ends with calls under way
        return Unavailable(f"{peer} ended before it answered")
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"{peer} did not answer within the deadline")
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return InvalidArgument(f"{peer} is no such service: {details}")
    return Internal(f"{peer} failed: {code.name}: {details}")


def _last_cause(details: str) -> str:
    """The innermost cause in gRPC's chain of messages."""
    cause = details.rsplit("last error: ", 1)[-1].rsplit("UNKNOWN: ", 1)[-1].rsplit("UNAVAILABLE: ", 1)[-1]
    cause = cause.rsplit("Failed to connect to remote host: ", 1)[-1]
    return " ".join(cause.split()) or "connection lost"
