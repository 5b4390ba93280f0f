"""Pull and Push over gRPC with nothing but the generated client: what a program in another language does."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

import sparserow as sr
from sparserow.proto import rows_pb2 as pb, rows_pb2_grpc as pb_grpc
from sparserow_process import Launcher, Process, free_port, stopped, wait_until

DIM = 4
KEYS = np.arange(50, dtype=np.uint64)


def start(launcher: Launcher, coordinator: str, port: int, *options: str) -> Process:
    gateway = launcher.start("gateway", f"--coordinator={coordinator}", f"--port={port}", *options)
    gateway.wait_for(r"gateway ready at gRPC \S+")
    return gateway


def push(client: str, sequence: int, keys: np.ndarray = KEYS, value: float = 1.0, **other: Any) -> pb.PushRowsRequest:
    request = {
        "namespace": "ads",
        "table": "user",
        "client": client,
        "sequence": sequence,
        "packed_keys": keys.tobytes(),
        "grads": np.full((len(keys), DIM), value, np.float32).tobytes(),
    }
    return pb.PushRowsRequest(**{**request, **other})


def refused(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return raised.value.code(), raised.value.details()


def test_rows_are_pulled_and_trained_once(launcher: Launcher) -> None:
    port = free_port()
    with sr.local_cluster(shards=2) as cluster, sr.connect(cluster.address, "ads", staleness=None) as session:
        table = session.create_table("user", dim=DIM, optimizer=sr.optim.SGD(lr=0.5), init=sr.Uniform(-1, 1), seed=3)
        session.create_table("wide", dim=1024, optimizer=sr.optim.SGD(lr=0.5)).pull(KEYS)
        first = table.pull(KEYS)
        gateway = start(launcher, cluster.address, port)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = pb_grpc.RowsStub(channel)

            def pull() -> tuple[np.ndarray, np.ndarray]:
                asked = pb.PullRowsRequest(namespace="ads", table="user", packed_keys=KEYS.tobytes())
                reply = stub.Pull(asked, timeout=60)
                rows = np.frombuffer(reply.rows, np.float32).reshape(len(KEYS), reply.dim)
                return rows, np.frombuffer(reply.found, np.bool_)

            rows, found = pull()
            np.testing.assert_array_equal(rows, first)
            assert not found.any()
            me = str(uuid.uuid4())
            assert not stub.Push(push(me, 1), timeout=60).was_applied_before
            assert stub.Push(push(me, 1), timeout=60).was_applied_before  # as if the reply had been lost
            rows, found = pull()
            np.testing.assert_allclose(rows, first - 0.5, atol=1e-6)
            assert found.all()
            assert not stub.Push(push(me, 2, lr=0.25), timeout=60).was_applied_before
            twice = np.concatenate([KEYS, KEYS[:10]])  # a repeated key's gradients are summed
            stub.Push(push("another", 1, twice), timeout=60)
            expected = first - 1.25
            expected[:10] -= 0.5
            np.testing.assert_allclose(pull()[0], expected, atol=1e-6)
            np.testing.assert_allclose(table.pull(KEYS), expected, atol=1e-6)

            for call, code, words in (
                (lambda: stub.Push(push(me, 1)), grpc.StatusCode.FAILED_PRECONDITION, "allowed: 2 again, or 3"),
                (lambda: stub.Push(push(me, 5)), grpc.StatusCode.FAILED_PRECONDITION, "allowed: 2 again, or 3"),
                (lambda: stub.Push(push("new", 4)), grpc.StatusCode.FAILED_PRECONDITION, "is not the first"),
                (lambda: stub.Push(push("", 1)), grpc.StatusCode.INVALID_ARGUMENT, "client: ''"),
                (lambda: stub.Push(push(me, 3, grads=b"xx")), grpc.StatusCode.INVALID_ARGUMENT, "grads: 2 bytes"),
                (lambda: stub.Push(push(me, 3, value=np.nan)), grpc.StatusCode.INVALID_ARGUMENT, "is not finite"),
                (lambda: stub.Push(push(me, 3, table="item")), grpc.StatusCode.NOT_FOUND, "tables there: user"),
                (lambda: stub.Pull(pb.PullRowsRequest(table="user")), grpc.StatusCode.INVALID_ARGUMENT, "namespace"),
                (
                    lambda: stub.Pull(pb.PullRowsRequest(namespace="ads", table="wide", packed_keys=bytes(8 * 20_000))),
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"which holds {(64 << 20) // (4 * 1024 + 12)} of 'wide'",
                ),
                (
                    lambda: stub.Pull(pb.PullRowsRequest(namespace="ads", table="user", packed_keys=b"123")),
                    grpc.StatusCode.INVALID_ARGUMENT,
                    "packed_keys are uint64",
                ),
            ):
                told_code, told = refused(call)
                assert (told_code, words in told) == (code, True), told
            np.testing.assert_allclose(pull()[0], expected, atol=1e-6)  # nothing of that was applied
            assert not stub.Push(push(me, 3), timeout=60).was_applied_before  # its number was still free

        gateway.signal(signal.SIGKILL)  # with it goes what it knew: a number of before is refused, not applied twice
        gateway.end()
        again = start(launcher, cluster.address, port)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = pb_grpc.RowsStub(channel)
            before = table.pull(KEYS)
            _, told = refused(lambda: stub.Push(push(me, 3), timeout=60, wait_for_ready=True))
            assert "Begin with 1 under another name" in told
            np.testing.assert_array_equal(table.pull(KEYS), before)
            stub.Push(push(str(uuid.uuid4()), 1), timeout=60)
            np.testing.assert_allclose(table.pull(KEYS), before - 0.5, atol=1e-6)
        again.signal(signal.SIGTERM)
        assert again.end() == 0


def test_a_push_that_its_client_gave_up_is_applied_once(launcher: Launcher) -> None:
    port = free_port()
    with sr.local_cluster(shards=2) as cluster, sr.connect(cluster.address, "ads", staleness=None) as session:
        table = session.create_table("user", dim=DIM, optimizer=sr.optim.SGD(lr=1.0))
        gateway = start(launcher, cluster.address, port)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = pb_grpc.RowsStub(channel)
            stub.Push(push("me", 1, value=-1.0), timeout=60)
            for sequence, is_cancelled in ((2, False), (3, True)):
                with stopped(cluster.shard_pids):
                    if is_cancelled:
                        call = stub.Push.future(push("me", sequence, value=-1.0), timeout=60)
                        time.sleep(1.0)
                        assert call.cancel()
                    else:
                        code, _ = refused(lambda n=sequence: stub.Push(push("me", n, value=-1.0), timeout=1.0))
                        assert code == grpc.StatusCode.DEADLINE_EXCEEDED
                # One that did not reach the gateway in time, on a busy machine, is pushed by its repeat.
                stub.Push(push("me", sequence, value=-1.0), timeout=60)
                assert stub.Push(push("me", sequence, value=-1.0), timeout=60).was_applied_before
                assert table.pull(KEYS).tolist() == [[float(sequence)] * DIM] * len(KEYS)
        gateway.signal(signal.SIGTERM)
        assert gateway.end() == 0


def test_clients_of_two_namespaces_and_made_up_tables(launcher: Launcher) -> None:
    port = free_port()
    with sr.local_cluster(shards=2) as cluster:
        tables = []
        sessions = [sr.connect(cluster.address, namespace, staleness=None) for namespace in ("ads", "news")]
        for session in sessions:
            tables.append(session.create_table("user", dim=DIM, optimizer=sr.optim.SGD(lr=1.0)))
        gateway = start(launcher, cluster.address, port)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = pb_grpc.RowsStub(channel)
            for namespace in ("ads", "news"):
                reply = stub.Push(push("me", 1, value=-1.0, namespace=namespace), timeout=60)
                assert not reply.was_applied_before
            for table in tables:
                assert table.pull(KEYS).tolist() == [[1.0] * DIM] * len(KEYS)
            jobs = len(sessions[0].core.catalog.status().jobs)
            code, _ = refused(lambda: stub.Push(push("me", 1, namespace="made-up"), timeout=60))
            assert code == grpc.StatusCode.NOT_FOUND
            assert len(sessions[0].core.catalog.status().jobs) == jobs
        gateway.signal(signal.SIGTERM)
        assert gateway.end() == 0
        for session in sessions:
            session.close()


def test_a_gateway_leaves_what_nobody_asks_for_and_keeps_its_name(launcher: Launcher) -> None:
    port = free_port()
    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, "n0", staleness=None) as session:

        def jobs_of_gateways() -> list[str]:
            return sorted(job.name for job in session.core.catalog.status().jobs if job.name.startswith("gateway-"))

        for namespace in ("n0", "n1", "n2"):
            with sr.connect(cluster.address, namespace, job="maker", staleness=None) as maker:
                maker.create_table("user", dim=DIM, optimizer=sr.optim.SGD(lr=1.0))
        options = ("--name", "here", "--namespaces", "2", "--idle", "2s")
        gateway = start(launcher, cluster.address, port, *options)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = pb_grpc.RowsStub(channel)
            before = len(psutil.Process(gateway.popen.pid).net_connections())
            for number in range(50):  # of no namespace that there is
                asked = pb.PullRowsRequest(namespace=f"made-up-{number}", table="user", keys=[1])
                assert refused(lambda asked=asked: stub.Pull(asked, timeout=60))[0] == grpc.StatusCode.NOT_FOUND
            assert jobs_of_gateways() == []
            for namespace in ("n0", "n1", "n2", "n0"):
                stub.Pull(pb.PullRowsRequest(namespace=namespace, table="user", keys=[1]), timeout=60)
                assert jobs_of_gateways() in (["gateway-here"], ["gateway-here"] * 2)
            wait_until(lambda: jobs_of_gateways() == [], "a gateway that leaves what nobody asks for")
            stub.Pull(pb.PullRowsRequest(namespace="n1", table="user", keys=[1]), timeout=60)
            assert jobs_of_gateways() == ["gateway-here"]
            wait_until(lambda: jobs_of_gateways() == [], "a gateway that leaves again")
            wait_until(
                lambda: len(psutil.Process(gateway.popen.pid).net_connections()) <= before + 2, "connections that end"
            )
        gateway.signal(signal.SIGTERM)
        assert gateway.end() == 0


def test_a_push_of_a_gateway_that_was_fenced_is_made_in_a_new_job(launcher: Launcher) -> None:
    port = free_port()
    with (
        sr.local_cluster(shards=2, worker_lease=2.0) as cluster,
        sr.connect(cluster.address, "ads", staleness=None) as session,
    ):
        table = session.create_table("user", dim=DIM, optimizer=sr.optim.SGD(lr=1.0))
        gateway = start(launcher, cluster.address, port)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = pb_grpc.RowsStub(channel)
            stub.Push(push("me", 1, value=-1.0), timeout=60)

            def gateway_jobs() -> int:
                jobs = session.core.catalog.status().jobs
                return sum(bool(job.members) for job in jobs if "gateway" in job.name)

            assert gateway_jobs() == 1
            gateway.signal(signal.SIGSTOP)
            try:
                wait_until(lambda: gateway_jobs() == 0, "the end of the gateway's lease")
            finally:
                gateway.signal(signal.SIGCONT)
            assert not stub.Push(push("me", 2, value=-1.0), timeout=60).was_applied_before
            assert stub.Push(push("me", 2, value=-1.0), timeout=60).was_applied_before
            assert table.pull(KEYS).tolist() == [[2.0] * DIM] * len(KEYS)
        gateway.signal(signal.SIGTERM)
        assert gateway.end() == 0


def test_a_gateway_without_a_cluster_says_so(launcher: Launcher) -> None:
    line = launcher.start("gateway", f"--coordinator=127.0.0.1:{free_port()}", "--port=0").error_line()
    assert "cannot be reached" in line
