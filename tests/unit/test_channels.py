"""A client that is made when a peer is back does not wait for the attempts of older clients."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc

from sparserow.proto.grpc_status import SERVER_OPTIONS
from sparserow.proto.security.channels import SecureChannel
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
