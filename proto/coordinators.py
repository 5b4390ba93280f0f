"""Connects to a cluster's coordinator, which has one address, or several of which one leads."""

from __future__ import annotations

import time
from typing import Any

import grpc

from . import control_pb2_grpc as pb_grpc
from .errors import InvalidArgument, not_allowed
from .grpc_status import error_of_status, leader_of_status
from .security.channels import SecureChannel
from .security.fresh_security import FreshSecurity

ELECTION_SEC = 20.0  # time in which several coordinators elect a leader
SILENCE_SEC = 3.0  # time without an answer after which another coordinator is asked
_PAUSE_SEC = 0.1


def parse_address(address: str, *, what: str = "address") -> tuple[str, int]:
    """Returns host and port of ``HOST:PORT`` (``[HOST]:PORT`` for IPv6).

    Args:
        address: the text to parse.
        what: the name of the option, which begins an error message.

    Raises:
        InvalidArgument: ``address`` does not have that form.
    """
    host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    host = host.strip("[]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise not_allowed(what, address, "HOST:PORT, such as 127.0.0.1:7000")
    return host, int(port)


class Addresses:
    """The addresses of a cluster's coordinators, and the one that receives calls now.

    Args:
        text: ``HOST:PORT``, or several of them with commas.
        what: the name of the option, which begins an error message.

    Attributes:
        all: every address, in the order of the text.
        now: the address that receives the next call.

    Raises:
        InvalidArgument: an address does not have that form.
    """

    def __init__(self, text: str, *, what: str = "address") -> None:
        self.all = tuple(part.strip() for part in text.split(","))
        for part in self.all:
            parse_address(part, what=what)
        self.now = self.all[0]

    def turn(self, error: grpc.RpcError, asked: str, *, may_repeat: bool) -> bool:
        """Turns to another coordinator after a failed call, where there is one and the failure calls for it.

        Args:
            error: the error of the call.
            asked: the address that the call went to.
            may_repeat: whether the call does no harm when it is done twice.

        Returns:
            Whether the same call may be made again, to the address in ``now``.
        """
        leader = leader_of_status(error)
        unreachable = error.code() == grpc.StatusCode.UNAVAILABLE and leader is None and not _is_ours(error)
        silent = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED and not _is_ours(error)
        if len(self.all) == 1 or not (unreachable or silent or leader is not None):
            return False
        if asked == self.now:
            following = self.all[(self.all.index(asked) + 1) % len(self.all)]
            self.now = leader if leader in self.all and leader != asked else following
        return may_repeat or not silent


def _is_ours(error: grpc.RpcError) -> bool:
    """Whether the coordinator itself returned the error, and not gRPC or the network."""
    return any(key.startswith("sparserow-") for key, _ in error.trailing_metadata() or ())


class CoordinatorChannel:
    """Synchronous calls to the coordinator that leads. Thread-safe.

    Args:
        address: ``HOST:PORT``, or several of them with commas.
        security: the certificates and token to use.

    Raises:
        InvalidArgument: ``address`` does not have that form.
    """

    def __init__(self, address: str, security: FreshSecurity) -> None:
        self._addresses = Addresses(address)
        self._channels = {each: SecureChannel(each, security) for each in self._addresses.all}
        self._stubs: dict[str, Any] = {each: pb_grpc.CoordinatorStub(it) for each, it in self._channels.items()}

    def close(self) -> None:
        """Closes the connections; a later call fails."""
        for channel in self._channels.values():
            channel.close()

    def call(
        self,
        method: str,
        request: Any,
        *,
        deadline_sec: float,
        may_repeat: bool = False,
        patience_sec: float = 0.0,
        election_sec: float = ELECTION_SEC,
    ) -> Any:
        """Makes one call and returns its reply.

        Args:
            method: the name of the method in the service.
            request: the message to send.
            deadline_sec: the deadline of each attempt. With several coordinators, an attempt that may be repeated waits
                at most ``SILENCE_SEC``.
            may_repeat: whether the call does no harm when it is done twice.
            patience_sec: how long a call that may be repeated is tried again while the coordinator cannot be reached or
                is not ready.
            election_sec: how long the leader among several coordinators is searched for.

        Raises:
            SparserowError: the error of the last attempt.
        """
        began = time.monotonic()
        if may_repeat and len(self._stubs) > 1:
            deadline_sec = min(deadline_sec, SILENCE_SEC)
        while True:
            asked = self._addresses.now
            try:
                return getattr(self._stubs[asked], method)(request, timeout=deadline_sec)
            except grpc.RpcError as error:
                failure = error_of_status(error, f"coordinator {asked}", remedy="; start it with `sparserow up`")
                may_come = may_repeat and failure.code in ("Unavailable", "DeadlineExceeded")
                patience = patience_sec if may_come else 0.0
                if self._addresses.turn(error, asked, may_repeat=may_repeat):
                    patience = max(patience, election_sec)
                if time.monotonic() - began >= patience:
                    raise failure from None
            except ValueError:
                raise InvalidArgument(f"the connection to coordinator {asked} is closed") from None
            time.sleep(_PAUSE_SEC)
