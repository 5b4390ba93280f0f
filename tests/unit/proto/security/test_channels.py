"""A client that is made when a peer is back does not wait for the attempts of older clients."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from sparserow.proto import control_pb2, control_pb2_grpc
from sparserow.proto.grpc_status import SERVER_OPTIONS
from sparserow.proto.security import channels
from sparserow.proto.security.channels import SecureChannel
from sparserow.proto.security.fresh_security import FreshSecurity
from sparserow.proto.security.security import Security
from sparserow_process import free_port

WAITS_SEC = 10.0


def call(channel: grpc.Channel) -> grpc.StatusCode:
    """How a call of a method that no server has ends."""
    try:
        channel.unary_unary("/nobody/Nothing")(b"", timeout=WAITS_SEC)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    raise AssertionError("a server has the method")


def test_a_new_channel_connects_although_an_older_one_waits_to_try_again() -> None:
    address = f"127.0.0.1:{free_port()}"
    with SecureChannel(address) as older:
        for _ in range(50):  # until the pause between two attempts is at its longest
            assert call(older) is grpc.StatusCode.UNAVAILABLE
        server = grpc.server(ThreadPoolExecutor(1), options=SERVER_OPTIONS)
        assert server.add_insecure_port(address)
        server.start()
        try:
            with SecureChannel(address) as newer:
                assert call(newer) is grpc.StatusCode.UNIMPLEMENTED
        finally:
            server.stop(None).wait(WAITS_SEC)


class Inner:
    """A channel of gRPC: what was opened with which certificates, and what was asked of it."""

    def __init__(self) -> None:
        self.is_closed = False
        self.calls: list[tuple[object, object]] = []

    def unary_unary(self, method: str) -> Callable[..., str]:
        def call(_: object, timeout: object, metadata: object) -> str:
            self.calls.append((timeout, metadata))
            return method

        return call

    def close(self) -> None:
        self.is_closed = True


def test_a_channel_shows_the_certificates_and_the_token_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Inner] = []

    def open_inner(_: SecureChannel, __: object) -> Inner:
        opened.append(Inner())
        return opened[-1]

    monkeypatch.setattr(SecureChannel, "_open", open_inner)
    files = FreshSecurity(Security(authorities="a", token="first"))
    with SecureChannel("host:1", files) as channel:
        call = channel.unary_unary("/x")
        assert call(b"", timeout=3.0) == "/x"
        files._own = Security(authorities="a", token="second")
        call(b"")
        assert opened[0].calls == [
            (3.0, (("authorization", "Bearer first"),)),
            (None, (("authorization", "Bearer second"),)),
        ]
        for authorities in ("b", "c", "d"):
            files._own = Security(authorities=authorities)
            call(b"")
        assert [len(each.calls) for each in opened] == [2, 1, 1, 1]
        assert not any(each.is_closed for each in opened)  # they may have calls of hours under way
        assert opened[3].calls == [(None, ())]
        monkeypatch.setattr(channels, "_LONGEST_CALL_SEC", -1.0)
        files._own = Security(authorities="e")
        call(b"")
        assert [each.is_closed for each in opened] == [True, True, True, False, False]
    assert all(each.is_closed for each in opened)


def test_a_method_that_is_first_called_on_a_closed_channel_ends_no_process() -> None:
    """gRPC's own channel ends the process by SIGSEGV there: a heartbeat may come back while its session closes."""
    channel = SecureChannel("127.0.0.1:1")
    stub = control_pb2_grpc.CoordinatorStub(channel)
    channel.close()
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:1: the channel is closed"):
        stub.WorkerHeartbeat(control_pb2.WorkerHeartbeatRequest(), timeout=1)
