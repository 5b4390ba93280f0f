"""TLS and tokens on real processes: who comes in, on both planes; certificates and tokens that change under way."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import sparserow as sr
from sparserow.deploy.launch.readiness import wait_until_ready
from sparserow.deploy.launch.security_files import (
    add_token,
    init_security,
    revoke_token,
    sign_certificate,
)
from sparserow.proto import serving_pb2, serving_pb2_grpc
from sparserow.proto.control import ControlClient
from sparserow.proto.process.whole_file import write_whole
from sparserow.proto.security.security import Security
from sparserow.worker.api.session import Session
from sparserow_process import Launcher, wait_until

KEYS = np.arange(200, dtype=np.uint64)
DIM = 4


class Secured:
    """A folder of security files, and clients' files beside them."""

    def __init__(self, folder: Path) -> None:
        self.path = init_security(folder, ["127.0.0.1"], valid_sec=3600)
        self.folder = folder
        self.tokens = folder / "tokens.yaml"

    def client(self, name: str, role: str, *namespaces: str) -> Path:
        """The security file of a client with a token of its own."""
        return self.client_of(name, add_token(self.tokens, name, role, namespaces))  # type: ignore[arg-type]

    def client_of(self, name: str, token: str) -> Path:
        """The security file of a client with this token."""
        write_whole(self.folder / f"{name}.token", token, mode=0o600)
        path = self.folder / f"{name}.yaml"
        path.write_text(f"ca: ca.pem\ntoken_file: {name}.token\n")
        return path


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Secured:
    return Secured(tmp_path_factory.mktemp("security") / "files")


@pytest.fixture(scope="module")
def cluster(secured: Secured) -> Iterator[sr.LocalCluster]:
    """A cluster whose processes have TLS and take tokens; this process has no identity of its own."""
    secured.client("trainer", "train")
    secured.client("reader", "serve-read")
    secured.client("brief", "train")
    secured.client("ads", "train", "ads")
    sr.use_security(secured.path)
    try:
        running = sr.local_cluster(shards=2)
        with running as cluster:
            sr.use_security(None)
            yield cluster
    finally:
        sr.use_security(None)


def rows_of(session: Session, name: str = "user") -> np.ndarray:
    return session.create_table(name, dim=DIM, optimizer=sr.optim.SGD(lr=0.5)).pull(KEYS)


def test_training_as_without(cluster: sr.LocalCluster, secured: Secured) -> None:
    with sr.connect(cluster.address, "ads", job="train", security=secured.folder / "trainer.yaml") as session:
        table = session.create_table("user", dim=DIM, optimizer=sr.optim.SGD(lr=0.5))
        table.push(KEYS, np.ones((len(KEYS), DIM), np.float32))
        np.testing.assert_array_equal(table.pull(KEYS), np.full((len(KEYS), DIM), -0.5, np.float32))
    with sr.connect(cluster.address, "ads", job="narrow", security=secured.folder / "ads.yaml") as session:
        rows_of(session)
        wait_until_ready(cluster.address, 20, str(secured.folder / "ads.yaml"))  # as its workers on Ray do
        with pytest.raises(sr.errors.PermissionDenied, match="does not reach namespace 'shop'"):
            sr.connect(cluster.address, "shop", security=secured.folder / "ads.yaml")


def test_a_token_of_one_namespace_has_no_say_in_the_jobs_of_another(cluster: sr.LocalCluster, secured: Secured) -> None:
    with (
        sr.connect(cluster.address, "shop", job="others", security=secured.folder / "trainer.yaml") as session,
        ControlClient(cluster.address, security=Security.load(secured.folder / "ads.yaml")) as control,
    ):
        assert session.core.identity is not None
        for call in (
            lambda identity: control.heartbeat_worker(identity, step=99),
            lambda identity: control.lease_data(identity, run="r", epoch=1, epochs=1, chunks=1, done=(), step=1),
            control.deregister_worker,
            lambda identity: control.report_fault(identity, message="m", traceback="", echo=False, deadline_sec=5),
        ):
            with pytest.raises(sr.errors.PermissionDenied, match="does not reach namespace 'shop'"):
                call(session.core.identity)
        session.create_table("cart", dim=DIM, optimizer=sr.optim.SGD(lr=0.5)).pull(KEYS)  # it is in its job still
        with ControlClient(cluster.address, security=Security.load(secured.folder / "trainer.yaml")) as owner:
            assert owner.heartbeat_worker(session.core.identity).lease_sec > 0
            owner.report_fault(session.core.identity, message="of a shop", traceback="t", echo=False, deadline_sec=5)
            assert "of a shop" in [fault.message for fault in owner.list_faults()]
        assert "shop" not in [fault.namespace for fault in control.list_faults()]


def test_who_has_no_business_here_is_told_so(cluster: sr.LocalCluster, secured: Secured, tmp_path: Path) -> None:
    with pytest.raises(sr.errors.Unavailable):
        sr.connect(cluster.address, "ads", deadline_sec=3.0)  # plain
    wrong = secured.client_of("wrong", "not a token")
    with pytest.raises(
        sr.errors.PermissionDenied, match="token: the token is missing, or not one that this server knows"
    ):
        sr.connect(cluster.address, "ads", security=wrong)
    reader = Security.load(secured.folder / "reader.yaml")
    with ControlClient(cluster.address, security=reader) as control:
        assert control.status().ready
        with pytest.raises(sr.errors.PermissionDenied, match="role serve-read does not allow Coordinator/DropTable"):
            control.drop_table("ads", "user")
    with pytest.raises(sr.errors.PermissionDenied, match="role serve-read does not allow Coordinator/RegisterWorker"):
        sr.connect(cluster.address, "ads", security=reader)
    stranger = Secured(tmp_path / "stranger").client("trainer", "train")
    with pytest.raises(sr.errors.Unavailable, match=r"(?i)certificate|cannot be reached"):
        sr.connect(cluster.address, "ads", deadline_sec=3.0, security=stranger)


def test_commands_take_the_file_as_an_option_or_from_the_environment(
    cluster: sr.LocalCluster, secured: Secured, launcher: Launcher
) -> None:
    launcher.environment["SPARSEROW_SECURITY"] = str(secured.path)
    status = launcher.start("status", f"--coordinator={cluster.address}")
    assert status.end() == 0, status.err
    shown = launcher.start("security", "show", str(secured.path))
    assert shown.end() == 0, shown.err
    assert "token taken        reader: serve-read, all namespaces" in shown.out
    assert "CN = 127.0.0.1, valid from" in shown.out
    del launcher.environment["SPARSEROW_SECURITY"]
    refused = launcher.start("status", f"--coordinator={cluster.address}").error_line()
    assert "cannot be reached" in refused


def test_an_address_that_others_reach_needs_protection(secured: Secured, launcher: Launcher) -> None:
    open_one = launcher.start("coordinator", "--shards=1", "--port=0", "--host=0.0.0.0")
    assert "give certificates and tokens with --security" in open_one.error_line()
    launcher.environment["SPARSEROW_SECURITY"] = str(secured.path)
    launcher.start("coordinator", "--shards=1", "--port=0", "--host=0.0.0.0").wait_for(r"coordinator at (\S+:\d+)")


def test_serving_asks_for_tokens_on_each_of_its_doors(
    cluster: sr.LocalCluster, secured: Secured, launcher: Launcher, tmp_path: Path
) -> None:
    root = str(tmp_path / "models")
    with sr.connect(cluster.address, "ads", job="publish", security=secured.path) as session:
        table = session.create_table("served", dim=DIM, optimizer=sr.optim.SGD(lr=0.5))
        table.assign(KEYS, np.arange(len(KEYS) * DIM, dtype=np.float32).reshape(-1, DIM))
        session.publish("ctr", root=root)
        rows = table.pull(KEYS)
    launcher.environment["SPARSEROW_SECURITY"] = str(secured.path)
    serving = launcher.start("serve", f"--root={root}", "--model=ctr", "--port=0", "--http-port=0")
    ready = serving.wait_for(r"ready at gRPC (\S+), data plane (\S+?), HTTP (\S+)\n")
    reader = secured.folder / "reader.yaml"
    with sr.ServingClient(ready[1], security=reader) as client:
        np.testing.assert_array_equal(client.lookup("served", KEYS).rows, rows)
    with pytest.raises(sr.errors.PermissionDenied, match="token: "):
        sr.ServingClient(ready[1], security=secured.client_of("wrong", "not a token"))
    with pytest.raises(sr.errors.Unavailable):
        sr.ServingClient(ready[1], deadline_sec=2.0)

    check_names_of_others_are_kept(ready[1], secured)

    body = json.dumps({"model": "ctr", "tables": {"served": [1, 2]}}).encode()
    context = ssl.create_default_context(cafile=str(secured.folder / "ca.pem"))

    def answer(path: str, data: bytes | None, token: str, scheme: str = "https") -> Any:
        request = urllib.request.Request(f"{scheme}://{ready[3]}{path}", data, {"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=60, context=context if scheme == "https" else None) as reply:
            return json.load(reply)

    def ask(token: str, scheme: str = "https") -> list[list[float]]:
        return answer("/v1/lookup", body, token, scheme)["tables"]["served"]["rows"]

    token = (secured.folder / "reader.token").read_text()
    assert answer("/v1/health", None, "not a token") == {"ready": True}
    assert answer("/v1/health", None, token) == {"ready": True, "problems": {}}
    np.testing.assert_array_equal(ask(token), rows[1:3])
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask("not a token")
    assert refused.value.code == 401
    with pytest.raises(OSError):  # noqa: PT011 - the connection ends, in whichever way
        ask(token, "http")


def check_names_of_others_are_kept(address: str, secured: Secured) -> None:
    """A token of another namespace learns neither models nor versions."""
    for namespace, names in (("ads", ["ctr"]), ("shop", [])):
        token = add_token(secured.tokens, f"reads {namespace}", "serve-read", (namespace,))
        wait_until(lambda token=token: described(address, secured, token) is not None, "the new token")  # type: ignore[misc]
        reply = described(address, secured, token)
        assert reply is not None
        assert [version.model for version in reply.versions] == names
        assert [alias.model for alias in reply.aliases] == names
        with secured_channel(address, secured) as channel:
            request = serving_pb2.LookupRequest(model="unknown")
            look_up = serving_pb2_grpc.ServingStub(channel).Lookup
            with pytest.raises(grpc.RpcError) as refused:
                look_up(request, timeout=60, metadata=(("authorization", f"Bearer {token}"),))
        assert ("ctr" in refused.value.details()) == bool(names)


def secured_channel(address: str, secured: Secured) -> grpc.Channel:
    return grpc.secure_channel(address, grpc.ssl_channel_credentials((secured.folder / "ca.pem").read_bytes()))


def described(address: str, secured: Secured, token: str) -> serving_pb2.DescribeReply | None:
    with secured_channel(address, secured) as channel:
        try:
            return serving_pb2_grpc.ServingStub(channel).Describe(
                serving_pb2.DescribeRequest(), timeout=60, metadata=(("authorization", f"Bearer {token}"),)
            )
        except grpc.RpcError:  # the server looks at its tokens once a second
            return None


def test_certificates_and_tokens_change_under_way(cluster: sr.LocalCluster, secured: Secured) -> None:
    brief = secured.folder / "brief.yaml"
    addresses = [cluster.address, *(f"{shard.host}:{shard.port}" for shard in cluster.shards)]

    def certificates() -> set[str]:
        return {ssl.get_server_certificate(_pair(address), timeout=60) for address in addresses}

    with (
        sr.connect(cluster.address, "ads", job="brief", security=brief) as session,
        sr.connect(cluster.address, "ads", job="stays", security=secured.path) as staying,
    ):
        table = session.create_table("brief", dim=DIM, optimizer=sr.optim.SGD(lr=0.5))
        before = certificates()
        assert len(before) == 1
        revoke_token(secured.tokens, "brief")  # first: who has read the new certificate has read this too
        sign_certificate(secured.folder, "server", ["127.0.0.1"], valid_sec=3600)
        wait_until(lambda: len(now := certificates()) == 1 and now != before, "the new certificate everywhere")

        def is_refused() -> bool:
            try:
                table.pull(KEYS)
            except sr.errors.PermissionDenied as error:
                return "not one that this server knows" in str(error)
            return False

        wait_until(is_refused, "the revoked token to be refused")
        with pytest.raises(sr.errors.PermissionDenied, match="not one that this server knows"):
            sr.connect(cluster.address, "ads", job="again", security=brief)
        assert rows_of(staying, "brief").shape == (len(KEYS), DIM)  # its connections were open before
    (secured.folder / "server.pem").write_text("no certificate")
    with sr.connect(cluster.address, "ads", job="after", security=secured.folder / "trainer.yaml") as session:
        rows_of(session, "brief")  # what cannot be read does not take the place of what could


def _pair(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
