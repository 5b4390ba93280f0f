"""Carries the error taxonomy over gRPC: trailing metadata has the number, and the status code is the closest one."""

from __future__ import annotations

import grpc

from .errors import DeadlineExceeded, Internal, InvalidArgument, SparserowError, Unavailable, error_of

CODE_KEY = "sparserow-code"
LEADER_KEY = "sparserow-leader"
# Proxies in the environment are for the web, so the calls within a cluster ignore them. A port in use is an error.
# Leases are counted in seconds, so a peer that is back must be found within a second or two. The reconnect back-off is
# therefore short. In spite of its name, min_reconnect_backoff_ms is the time that an attempt may take: a busy peer may
# be slow to greet. A connection whose packets are not acknowledged is given up after 10 s. TCP alone would retry as
# late as it was silent before. (With a keepalive time, gRPC sets TCP_USER_TIMEOUT to the keepalive timeout. Servers
# tolerate few keepalive pings, so they are an hour apart.)
_SILENCE_MS = 10_000
# A server closes a connection that has not finished TLS and the HTTP/2 greeting in time, or had no call for long.
# Connections have no maximum age, because Load and Dump are streams of hours.
_HANDSHAKE_MS = 5_000
_IDLE_MS = 600_000
_STREAMS = 1024  # calls at once on one connection
# Replies about all tables of a cluster grow with the tables: gRPC's default of 4 MiB is reached at some thousands.
_MESSAGE_BYTES = 256 << 20
CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 3_600_000),
    ("grpc.keepalive_timeout_ms", _SILENCE_MS),
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    # A channel makes connection attempts of its own. From the shared pool it would get the back-off of an older
    # channel.
    ("grpc.use_local_subchannel_pool", 1),
)
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_timeout_ms", _SILENCE_MS),
    ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
    ("grpc.max_connection_idle_ms", _IDLE_MS),
    ("grpc.max_concurrent_streams", _STREAMS),
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
    "OutsideQuorum": grpc.StatusCode.ABORTED,
    "PermissionDenied": grpc.StatusCode.PERMISSION_DENIED,
}


class NotLeader(Unavailable):
    """Another coordinator leads.

    Attributes:
        leader: the address of the coordinator that leads; empty when it is not known.
    """

    def __init__(self, message: str, leader: str) -> None:
        super().__init__(message)
        self.leader = leader


def status_of_error(error: SparserowError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Returns the status code, message and trailing metadata that carry ``error``."""
    metadata: tuple[tuple[str, str], ...] = ((CODE_KEY, str(error.number)),)
    if isinstance(error, NotLeader):
        metadata += ((LEADER_KEY, error.leader),)
    return _STATUS[error.code], str(error), metadata


def leader_of_status(error: grpc.RpcError) -> str | None:
    """Returns the leader that a coordinator names when it does not lead itself.

    The result is empty when the coordinator knows no leader, and None for any other error.
    """
    return next((str(value) for key, value in error.trailing_metadata() or () if key == LEADER_KEY), None)


def error_of_status(error: grpc.RpcError, peer: str, *, remedy: str = "") -> SparserowError:
    """Returns the exception of the taxonomy behind a failed call.

    Args:
        error: the error of a synchronous or an asyncio call.
        peer: the called server as error messages name it, such as ``coordinator 127.0.0.1:7000``.
        remedy: the end of the message when the peer cannot be reached, such as ``; start it with ...``.
    """
    details = (error.details() or "").strip()
    for key, value in error.trailing_metadata() or ():
        if key == CODE_KEY:
            return error_of(int(value), details)
    code = error.code()
    if code == grpc.StatusCode.UNAVAILABLE:
        return Unavailable(f"{peer} cannot be reached: {_last_cause(details)}{remedy}")
    if code == grpc.StatusCode.CANCELLED:  # no client here cancels; a server that ends cancels the calls under way
        return Unavailable(f"{peer} ended before it answered")
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(f"{peer} did not answer within the deadline")
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return InvalidArgument(f"{peer} does not offer this service: {details}")
    return Internal(f"{peer} failed: {code.name}: {details}")


def _last_cause(details: str) -> str:
    """Returns the innermost cause in gRPC's chain of messages."""
    cause = details.rsplit("last error: ", 1)[-1].rsplit("UNKNOWN: ", 1)[-1].rsplit("UNAVAILABLE: ", 1)[-1]
    cause = cause.rsplit("Failed to connect to remote host: ", 1)[-1]
    return " ".join(cause.split()) or "connection lost"
