"""Several coordinators lead in turn through a real etcd; who does not lead writes nothing."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from restart_scene import DIM, ROWS, Trained, facts, is_ready, rows_of, status_of
from sparserow.deploy.launch.security_files import init_security, sign_certificate
from sparserow.proto import etcd_pb2
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import DataLoss, InvalidArgument, SparserowError, Unavailable
from sparserow.proto.grpc_status import NotLeader
from sparserow.proto.optim import SGD
from sparserow.proto.schema import TableSchema
from sparserow.proto.security.security import use_security
from sparserow.ps_server.coordinator.storage.etcd import EtcdAddress, EtcdSeat
from sparserow_process import Launcher, free_port, stop, wait_until

pytestmark = [
    pytest.mark.started,
    pytest.mark.skipif(shutil.which("etcd") is None, reason="needs the program etcd (Debian: etcd-server)"),
]


class Etcd:
    """One server of its own; with the folder of an authority it takes clients with certificates of that."""

    def __init__(self, folder: Path, security: Path | None = None) -> None:
        port, peers = free_port(), f"http://127.0.0.1:{free_port()}"
        self.endpoint = f"127.0.0.1:{port}"
        url = f"{'http' if security is None else 'https'}://{self.endpoint}"
        tls = [] if security is None else [
            f"--cert-file={security / 'server.pem'}", f"--key-file={security / 'server.key'}",
            "--client-cert-auth", f"--trusted-ca-file={security / 'ca.pem'}",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            ["etcd", f"--data-dir={folder / 'etcd'}", "--log-level=error", f"--listen-client-urls={url}",
             f"--advertise-client-urls={url}", f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}",
             f"--initial-cluster=default={peers}", *tls],
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        wait_until(self._answers, "etcd to listen")

    def _answers(self) -> bool:
        host, port = self.endpoint.split(":")
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    server = Etcd(tmp_path)
    yield server
    server.process.kill()
    server.process.wait()


def seat(etcd: Etcd, address: str) -> EtcdSeat:
    return EtcdSeat(EtcdAddress(f"etcd://{etcd.endpoint}/tests/one"), address, 2, lambda: None)


def lead(one: EtcdSeat) -> int:
    wait_until(lambda: one.term, "a leader")
    return one.term


def test_who_has_lost_the_seat_without_knowing_it_writes_nothing(etcd: Etcd) -> None:
    first = seat(etcd, "a:1")
    term = lead(first)
    first.save(term, {"of": "a"})
    second = seat(etcd, "b:2")
    wait_until(lambda: second.leader == "a:1", "the follower to see the leader")
    with pytest.raises(NotLeader, match="coordinator b:2 is not the leader; the leader is a:1"):
        second.load(0)
    # As if the first had been stopped for a while and not looked at its clock yet.
    first._closing.set()
    first._thread.join = lambda _=None: None  # type: ignore[method-assign]
    first._lose, lost = (lambda: None), first._lose  # type: ignore[method-assign]
    wait_until(lambda: not first._thread.is_alive(), "its thread to end, which gives the lease back")
    first._until = time.monotonic() + 60
    next_term = lead(second)
    assert second.load(next_term) == {"of": "a"}
    second.save(next_term, {"of": "b"})
    first._lose = lost  # type: ignore[method-assign]
    assert first.term == term
    with pytest.raises(NotLeader, match="coordinator a:1 is not the leader"):
        first.save(term, {"of": "a again"})
    assert second.load(next_term) == {"of": "b"}
    assert first.term == 0
    second.close()
    first.close()


def test_a_write_waits_for_etcd_as_long_as_the_term_lasts(etcd: Etcd) -> None:
    one = seat(etcd, "a:1")
    term = lead(one)
    stop(etcd.process.pid)
    threading.Timer(0.5, etcd.process.send_signal, (signal.SIGCONT,)).start()
    one.save(term, {"n": 1})
    assert one.load(term) == {"n": 1}
    stop(etcd.process.pid)
    with pytest.raises(NotLeader):
        one.save(term, {"n": 2})
    etcd.process.send_signal(signal.SIGCONT)
    wait_until(lambda: one.term, "another term")
    assert one.term != term, "what was begun in the former term must not be taken for the next one's"
    one.close()


def test_places_and_states_that_are_none_are_named(etcd: Etcd) -> None:
    for url in ("etcd://h:1", "etcd:///a", "etc://h:1/a", "etcd://h/a"):
        with pytest.raises(InvalidArgument, match="--state"):
            EtcdAddress(url)
    with pytest.raises(InvalidArgument, match="needs --security"):
        EtcdAddress("etcds://h:1/a")
    one = seat(etcd, "a:1")
    term = lead(one)
    key = one._place.state_key
    one._call("KV", "Txn", etcd_pb2.TxnRequest(
        success=[etcd_pb2.RequestOp(request_put=etcd_pb2.PutRequest(key=key, value=b"{"))]))  # fmt: skip
    with pytest.raises(DataLoss, match="is not JSON"):
        one.load(term)
    one.close()


def test_probes_are_answered_also_while_there_is_no_leader(launcher: Launcher) -> None:
    started = launcher.start("coordinator", "--shards=1", "--port=0", "--state=etcd://127.0.0.1:1/a", "--health-port=0",
                             "--page-port=0")  # fmt: skip
    port = started.wait_for(r"health is answered at 127\.0\.0\.1:(\d+)")[1]
    started.wait_for("one of those at etcd://127.0.0.1:1/a")
    page = started.wait_for(r"page at (\S+)\n")[1]
    with pytest.raises(urllib.error.HTTPError, match="503") as refused:
        urllib.request.urlopen(f"{page}status.json", timeout=60)
    assert "is not the leader" in json.load(refused.value)["error"]
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
    started.signal(signal.SIGTERM)
    assert started.end() == 0


@pytest.mark.full
def test_training_goes_on_whoever_leads(launcher: Launcher, etcd: Etcd) -> None:
    ports = [free_port(), free_port()]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    both = ",".join(addresses)
    coordinators = {
        address: launcher.start("coordinator", "--shards=1", "--slot-count=64", f"--port={port}", "--worker-lease=4s",
                                "--shard-lease=4s", f"--state=etcd://{etcd.endpoint}/jobs/ads", "--log-level=warning")
        for address, port in zip(addresses, ports, strict=True)
    }  # fmt: skip
    shard = launcher.start("ps", f"--coordinator={both}", "--shard=0", "--log-level=error")

    def leader() -> str:
        for address in addresses:
            try:
                status_of(address)
            except SparserowError:
                continue
            return address
        return ""

    wait_until(lambda: is_ready(both), "a leader and its shard")
    trained = Trained(both, 2)
    trained.go_on(1)
    before, first = facts(both), leader()
    other = next(address for address in addresses if address != first)
    wait_until(lambda: "the leader is" in _refusal(other), "the other, which may still be starting, to name the leader")
    assert f"coordinator {other} is not the leader; the leader is {first}" in _refusal(other)
    # Stopped, and back when another one leads.
    coordinators[first].signal(signal.SIGSTOP)
    wait_until(lambda: _leads(other), "the other to lead")
    wait_until(lambda: is_ready(both), "the shard to come over")
    trained.go_on(5)
    with ControlClient(both) as control:
        control.create_table(TableSchema("later", "rows", DIM, SGD(lr=1.0)))
    coordinators[first].signal(signal.SIGCONT)
    with pytest.raises(Unavailable, match=f"coordinator {first} is not the leader"):
        status_of(first)
    assert leader() == other
    with ControlClient(both) as control:
        assert [table.full_name for table in control.list_tables("later")] == ["later/rows"]
        control.drop_table("later", "rows")
    assert facts(both) == before
    # Killed.
    coordinators[other].popen.kill()
    wait_until(lambda: _leads(first), "the first to lead again")
    wait_until(lambda: is_ready(both), "the shard to come over")
    trained.go_on(5)
    assert facts(both) == before
    # etcd is away for longer than the leader's lease.
    stop(etcd.process.pid)
    wait_until(lambda: not _leads(first), "the leader to step down")
    trained.go_on(5)
    etcd.process.send_signal(signal.SIGCONT)
    wait_until(lambda: is_ready(both), "a leader and its shard")
    trained.go_on(5)
    assert facts(both) == before
    trained.end()
    for rank, done in enumerate(trained.steps):
        np.testing.assert_array_equal(rows_of(both, rank), np.full((ROWS, DIM), -done, np.float32))
    assert shard.popen.poll() is None


def _leads(address: str) -> bool:
    return not _refusal(address)


def _refusal(address: str) -> str:
    """What a coordinator answers when it is asked for the status; empty when it gives the status."""
    try:
        status_of(address)
    except SparserowError as error:
        return str(error)
    return ""


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Etcd]:
    """A server with TLS that takes certificates of one authority; the name in one is the user."""
    folder = init_security(tmp_path / "security", ["127.0.0.1"], valid_sec=3600).parent
    for name in ("coordinator", "stranger"):
        sign_certificate(folder, name, [name, "127.0.0.1"], valid_sec=3600)
        (folder / f"{name}.yaml").write_text(f"ca: ca.pem\ncert: {name}.pem\nkey: {name}.key\n")
    server = Etcd(tmp_path, folder)
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.load_cert_chain(folder / "server.pem", folder / "server.key")

    def ask(path: str, **body: object) -> None:
        request = urllib.request.Request(f"https://{server.endpoint}/v3/auth/{path}", json.dumps(body).encode())
        urllib.request.urlopen(request, context=context, timeout=20).close()

    ask("role/add", name="root")
    for user in ("root", "coordinator"):
        ask("user/add", name=user, options={"no_password": True})
        ask("user/grant", user=user, role="root")
    ask("enable")
    yield server
    server.process.kill()
    server.process.wait()
    use_security(None)


def test_a_guarded_etcd_knows_a_coordinator_by_its_certificate(guarded: Etcd, tmp_path: Path) -> None:
    def guarded_seat(name: str) -> EtcdSeat:
        use_security(tmp_path / "security" / f"{name}.yaml")
        return EtcdSeat(EtcdAddress(f"etcds://{guarded.endpoint}/tests/one"), f"{name}:1", 2, lambda: None)

    own = guarded_seat("coordinator")
    term = lead(own)
    own.save(term, {"of": "coordinator"})
    assert own.load(term) == {"of": "coordinator"}
    own.close()
    stranger = guarded_seat("stranger")
    wait_until(lambda: "permission denied" in stranger.problem or "user name" in stranger.problem, "the refusal")
    assert not stranger.term
    stranger.close()
    (tmp_path / "security" / "plain.yaml").write_text("ca: ca.pem\n")
    without = guarded_seat("plain")
    wait_until(lambda: bool(without.problem), "the refusal")
    assert not without.term
    without.close()
