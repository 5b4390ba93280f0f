"""Attacks on a gateway by tokens of their own: what one may read, push or take from the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

import sparserow as sr
from sparserow.deploy.launch.security_files import Role, add_token, init_security
from sparserow.proto import rows_pb2 as pb, rows_pb2_grpc as pb_grpc
from sparserow.proto.control import ControlClient
from sparserow.proto.process.whole_file import write_whole
from sparserow.proto.security.channels import SecureChannel
from sparserow.proto.security.security import Security
from sparserow_process import Launcher, Process

DIM = 4
KEYS = np.arange(50, dtype=np.uint64)
NAMESPACES = ("ads", "news")


class Scene:
    """A cluster of two namespaces with a table each, a gateway, and a channel for every token."""

    def __init__(self, folder: Path, launcher: Launcher) -> None:
        self.path = init_security(folder, ["127.0.0.1"], valid_sec=3600)
        self.folder = folder
        tokens: dict[str, tuple[Role, tuple[str, ...]]] = {
            "all": ("train", ()),
            "ads": ("train", ("ads",)),
            "news": ("train", ("news",)),
            "reader": ("serve-read", ("ads",)),
        }
        for name, (role, namespaces) in tokens.items():
            write_whole(folder / f"{name}.token", add_token(folder / "tokens.yaml", name, role, namespaces), mode=0o600)
            (folder / f"{name}.yaml").write_text(f"ca: ca.pem\ntoken_file: {name}.token\n")
        self.launcher = launcher
        self.names = tuple(tokens)
        self.stubs: dict[str, pb_grpc.RowsStub] = {}
        self.address = ""
        self.gateway: Process | None = None

    def security(self, name: str) -> Security:
        return Security.load(self.folder / f"{name}.yaml")

    def start(self, cluster: sr.LocalCluster) -> None:
        self.address = cluster.address
        for namespace in NAMESPACES:
            with sr.connect(cluster.address, namespace, job="maker", security=self.security("all")) as session:
                session.create_table("user", dim=DIM, optimizer=sr.optim.SGD(lr=1.0), init=sr.Constant(0.0))
        self.launcher.environment["SPARSEROW_SECURITY"] = str(self.path)
        self.gateway = self.launcher.start("gateway", f"--coordinator={cluster.address}", "--port=0")
        where = self.gateway.wait_for(r"gateway ready at gRPC (\S+)")[1].rstrip(",")
        self.stubs = {name: pb_grpc.RowsStub(SecureChannel(where, self.security(name))) for name in self.names}

    def push(self, token: str, namespace: str, client: str, sequence: int) -> pb.PushRowsReply:
        """Adds one to every weight of a namespace's table."""
        request = pb.PushRowsRequest(
            namespace=namespace,
            table="user",
            client=client,
            sequence=sequence,
            packed_keys=KEYS.tobytes(),
            grads=np.full((len(KEYS), DIM), -1.0, np.float32).tobytes(),
        )
        return self.stubs[token].Push(request, timeout=60)

    def rows(self, namespace: str) -> set[float]:
        """The different weights of a namespace's table."""
        request = pb.PullRowsRequest(namespace=namespace, table="user", packed_keys=KEYS.tobytes())
        return set(np.frombuffer(self.stubs["all"].Pull(request, timeout=60).rows, np.float32).tolist())

    def jobs(self) -> int:
        """How many jobs the cluster has."""
        with ControlClient(self.address, security=self.security("all")) as control:
            return len(control.status().jobs)

    def connections(self) -> int:
        """How many connections the gateway has."""
        assert self.gateway is not None
        return len(psutil.Process(self.gateway.popen.pid).net_connections())


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("gateway")
    launcher = Launcher(folder)
    scene = Scene(folder / "security", launcher)
    sr.use_security(scene.path)
    try:
        with sr.local_cluster(shards=2) as cluster:
            sr.use_security(None)
            scene.start(cluster)
            yield scene
    finally:
        sr.use_security(None)
        launcher.kill_all()


def refusal(call: object, *args: object) -> str:
    with pytest.raises(grpc.RpcError) as raised:
        call(*args)  # type: ignore[operator]
    assert raised.value.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.FAILED_PRECONDITION)
    return str(raised.value.details())


def test_a_name_and_a_number_that_two_tokens_share_are_two_pushes(scene: Scene) -> None:
    before = {namespace: scene.rows(namespace) for namespace in NAMESPACES}
    for namespace in NAMESPACES:
        assert not scene.push(namespace, namespace, "trainer-0", 1).was_applied_before
        assert scene.push(namespace, namespace, "trainer-0", 1).was_applied_before
    for namespace in NAMESPACES:
        assert scene.rows(namespace) == {value + 1.0 for value in before[namespace]}


def test_a_refused_push_takes_neither_rows_nor_the_number_of_another(scene: Scene) -> None:
    before = scene.rows("ads")
    assert "does not reach namespace 'ads'" in refusal(scene.push, "news", "ads", "victim", 1)
    assert "role serve-read does not allow" in refusal(scene.push, "reader", "ads", "victim", 1)
    assert scene.rows("ads") == before
    assert not scene.push("ads", "ads", "victim", 1).was_applied_before
    assert scene.rows("ads") == {value + 1.0 for value in before}


def test_refused_calls_leave_nothing_at_the_gateway_or_the_coordinator(scene: Scene) -> None:
    scene.push("ads", "ads", "warm", 1)
    scene.rows("news")
    jobs, connections = scene.jobs(), scene.connections()
    for number in range(300):
        refusal(scene.push, "reader", "ads", f"refused-{number}", 1)
        asked = pb.PullRowsRequest(namespace=f"made-up-{number}", table="user", keys=[1])
        refusal(scene.stubs["reader"].Pull, asked)
    assert scene.jobs() == jobs
    assert scene.connections() <= connections + 1  # of a new stub, where the first closed an idle one
    assert not scene.push("ads", "ads", "honest", 1).was_applied_before


def test_a_reader_reads_its_namespace_alone(scene: Scene) -> None:
    own = pb.PullRowsRequest(namespace="ads", table="user", packed_keys=KEYS.tobytes())
    assert len(scene.stubs["reader"].Pull(own, timeout=60).rows) == len(KEYS) * DIM * 4
    other = pb.PullRowsRequest(namespace="news", table="user", packed_keys=KEYS.tobytes())
    assert "does not reach namespace 'news'" in refusal(scene.stubs["reader"].Pull, other)
