"""Servers that ask for certificates: who shows none, or one of another authority, comes through no door."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

import sparserow as sr
from sparserow.cpp_ext import _client
from sparserow.deploy.launch.security_files import add_token, init_security, sign_certificate
from sparserow.proto.control import ControlClient
from sparserow.proto.security.security import Security

KEYS = np.arange(20, dtype=np.uint64)


class Scene:
    """A cluster with mTLS, and the security files of peers by name."""

    def __init__(self, folder: Path) -> None:
        self.path = init_security(folder / "own", ["127.0.0.1"], valid_sec=3600)
        self.folder = self.path.parent
        self.path.write_text(self.path.read_text() + "client_ca: ca.pem\n")
        add_token(self.folder / "tokens.yaml", "trainer", "train", (), output=self.folder / "trainer.token")
        other = init_security(folder / "other", ["127.0.0.1"], valid_sec=3600).parent
        sign_certificate(self.folder, "worker", ["worker"], valid_sec=3600)
        sign_certificate(other, "worker", ["worker"], valid_sec=3600)
        with_token = "ca: ca.pem\ntoken_file: trainer.token\n"
        (self.folder / "honest.yaml").write_text(f"{with_token}cert: worker.pem\nkey: worker.key\n")
        (self.folder / "none.yaml").write_text(with_token)
        (self.folder / "of another.yaml").write_text(
            f"{with_token}cert: {other / 'worker.pem'}\nkey: {other / 'worker.key'}\n"
        )

    def security(self, name: str) -> Security:
        return Security.load(self.folder / f"{name}.yaml")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scene, sr.LocalCluster]]:
    made = Scene(tmp_path_factory.mktemp("mtls"))
    sr.use_security(made.path)
    try:
        running = sr.local_cluster(shards=1)
        with running as cluster:
            sr.use_security(None)
            yield made, cluster
            sr.use_security(made.path)
    finally:
        sr.use_security(None)


def test_a_certificate_of_the_authority_comes_in(scene: tuple[Scene, sr.LocalCluster]) -> None:
    files, cluster = scene
    with sr.connect(cluster.address, "ads", security=files.security("honest")) as session:
        table = session.create_table("user", dim=4, optimizer=sr.optim.SGD(lr=0.5))
        table.push(KEYS, np.ones((len(KEYS), 4), np.float32))
        assert table.pull(KEYS)[0, 0] == -0.5


@pytest.mark.parametrize("name", ["none", "of another"])
def test_a_token_without_it_does_not(scene: tuple[Scene, sr.LocalCluster], name: str) -> None:
    files, cluster = scene
    security = files.security(name)
    with (
        ControlClient(cluster.address, deadline_sec=5.0, security=security) as control,
        pytest.raises(sr.errors.Unavailable),
    ):
        control.cluster()
    (shard,) = cluster.shards
    owners = np.zeros(16384, np.uint16)
    with pytest.raises(sr.errors.Unavailable, match=r"(?i)certificate|closed|alert"):
        _client.Client(
            shards=[(shard.host, shard.port)],
            slot_owner=owners,
            route_epoch=1,
            connect_timeout_ms=3000,
            **security.native_client(),
        )


def test_nor_do_plain_connections(scene: tuple[Scene, sr.LocalCluster]) -> None:
    _, cluster = scene
    with contextlib.closing(grpc.insecure_channel(cluster.address)) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5.0)
    assert refused.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
