"""Security files, and what a token may call on the control plane."""

from __future__ import annotations

import datetime
import hashlib
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from sparserow.cpp_ext import _client, _server
from sparserow.deploy.launch.security_files import (
    add_token,
    certificate_names,
    init_security,
    read_tokens,
    revoke_token,
    sign_certificate,
)
from sparserow.proto import changes_pb2, control_pb2 as pb, rows_pb2 as rows_pb, serving_pb2
from sparserow.proto.errors import FailedPrecondition, InvalidArgument, NotFound, PermissionDenied
from sparserow.proto.process import access
from sparserow.proto.process.access import check_call, check_certificate, check_request
from sparserow.proto.security.security import Security, bearer_token

COORDINATOR = "/sparserow.v1.Coordinator/"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    init_security(tmp_path / "sec", ["127.0.0.1", "ps.example"], valid_sec=3600)
    return tmp_path / "sec"


def test_init_makes_what_a_server_and_a_client_need(folder: Path) -> None:
    security = Security.load(folder / "security.yaml")
    assert security.protects_listeners
    assert security.grant_of(security.token).role == "admin"
    assert security.token not in (folder / "tokens.yaml").read_text()
    assert {p.name for p in folder.iterdir() if p.stat().st_mode & 0o077} == {"ca.pem", "server.pem", "security.yaml"}
    assert security.token not in repr(security)
    assert "PRIVATE" not in repr(security)
    with pytest.raises(FailedPrecondition, match="the folder has files already"):
        init_security(folder, ["127.0.0.1"], valid_sec=3600)


def test_limits_reach_the_server(folder: Path) -> None:
    assert Security.load(folder / "security.yaml").native_server()["max_connections"] == 4096
    (folder / "limited.yaml").write_text(
        "limits: {connections: 7, client_connections: 3, frame_bytes: 1MiB, client_inflight_bytes: 2MiB}"
    )
    given = Security.load(folder / "limited.yaml").native_server()
    assert (given["max_connections"], given["max_client_connections"]) == (7, 3)
    assert (given["max_frame_bytes"], given["client_inflight_bytes"]) == (1 << 20, 2 << 20)
    server = _server.Server(_server.Store(slot_count=16), **given)
    with pytest.raises(Exception, match=r"127\.0\.0\.1 has its 3 connections"):
        [_connected(server.port) for _ in range(4)]


def _connected(port: int) -> _client.Client:
    owner = np.zeros(16, np.uint16)
    return _client.Client(shards=[("127.0.0.1", port)], slot_owner=owner, route_epoch=0, connect_timeout_ms=500)


def test_names_of_certificates() -> None:
    assert certificate_names(["10.0.0.1", "::1", "ps-0.ps", "*.ps"]) == "IP:10.0.0.1,IP:::1,DNS:ps-0.ps,DNS:*.ps"
    for wrong in ("a b", "x,DNS:y", ""):
        with pytest.raises(InvalidArgument, match="--host"):
            certificate_names([wrong])
    with pytest.raises(InvalidArgument, match="--host: the option is missing"):
        certificate_names([])


def test_more_certificates(folder: Path) -> None:
    certificate, key = sign_certificate(folder, "worker", ["worker"], valid_sec=60)
    assert certificate.read_text() != (folder / "server.pem").read_text()
    assert key.stat().st_mode & 0o077 == 0
    with pytest.raises(InvalidArgument, match="name: 'ca'"):
        sign_certificate(folder, "ca", ["worker"], valid_sec=60)
    with pytest.raises(InvalidArgument, match="sparserow security init"):
        sign_certificate(folder / "none", "worker", ["worker"], valid_sec=60)


def test_a_certificate_that_names_no_host_is_not_shown(folder: Path) -> None:
    """Its subject names one, which clients of old took for the host."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    draft = x509.CertificateBuilder(name, name, key.public_key(), 7, now, now + datetime.timedelta(hours=1))
    text = draft.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    with pytest.raises(InvalidArgument, match="certificate: it names no host in subjectAltName"):
        check_certificate(Security(certificate=text))
    with pytest.raises(InvalidArgument, match="certificate: it names no host in subjectAltName"):
        _server.Server(_server.Store(slot_count=16), tls=("", text, private))
    check_certificate(Security.load(folder / "security.yaml"))
    check_certificate(Security())


def test_tokens_are_added_and_revoked_by_name(folder: Path) -> None:
    path = folder / "tokens.yaml"
    token = add_token(path, "ads", "train", ["ads", "news"])
    entry = read_tokens(path)[-1]
    assert (entry.name, entry.role, entry.namespaces) == ("ads", "train", ("ads", "news"))
    assert entry.sha256 == hashlib.sha256(token.encode()).hexdigest()
    with pytest.raises(FailedPrecondition, match="the file has a token named 'ads'"):
        add_token(path, "ads", "train", [])
    with pytest.raises(InvalidArgument, match="role: 'root' is not allowed; allowed: serve-read, train, admin"):
        add_token(path, "more", "root", [])  # type: ignore[arg-type]
    add_token(path, "everywhere", "train", (), output=folder / "everywhere.token")
    assert read_tokens(path)[-1].namespaces is None
    assert (folder / "everywhere.token").stat().st_mode & 0o777 == 0o600
    revoke_token(path, "ads")
    with pytest.raises(NotFound, match="no token named 'ads'; it has: servers and operators"):
        revoke_token(path, "ads")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cart: a.pem", "cart: unknown key; did you mean 'cert'"),
        ("cert: server.pem", "cert and key belong together"),
        ("{cert: server.pem, key: server.key}", "ca is missing"),
        ("client_ca: ca.pem", "client_ca has no effect without cert"),
        ("ca: nowhere.pem", "ca: .*nowhere.pem cannot be read"),
        ("token_file: empty\ntoken_in_clear: true", "token_file: allowed: a token of 1 to"),
        ("{token_file: read, token_in_clear: true}", "token_file: .*read: others may read or change it; .* 0600"),
        ("{cert: server.pem, key: read, ca: ca.pem}", "key: .*read: others may read or change it"),
        ("signing_key: read", "signing_key: .*read: others may read or change it"),
        ("tokens: bad.yaml", "sha256: 'xyz' is not allowed"),
        ("limits: {connections: 0}", "limits.connections: 0 is not allowed; allowed: "),
        ("limits: {client_inflight_bytes: 1MiB}", "client_inflight_bytes: 1048576 is less than frame_bytes"),
    ],
)
def test_what_is_wrong_in_a_security_file_is_named(folder: Path, text: str, words: str) -> None:
    (folder / "empty").write_text("\n")
    (folder / "empty").chmod(0o600)
    (folder / "read").write_text("secret")
    (folder / "read").chmod(0o644)
    (folder / "bad.yaml").write_text("tokens: [{name: a, sha256: xyz, role: train}]")
    (folder / "security.yaml").write_text(text)
    with pytest.raises(InvalidArgument, match=words):
        Security.load(folder / "security.yaml")


def test_roles_on_the_control_plane(folder: Path) -> None:
    path = folder / "tokens.yaml"
    tokens = {role: add_token(path, role, role, []) for role in ("serve-read", "train", "admin")}
    ads = add_token(path, "ads", "train", ["ads"])
    security = Security.load(folder / "security.yaml")

    def allows(token: str, method: str, request: object) -> bool:
        metadata = [("user-agent", "x"), ("authorization", f"Bearer {token}")]
        try:
            check_call(security, method, metadata)
            check_request(request)
        except PermissionDenied:
            return False
        return True

    none = add_token(path, "none", "admin", ["x"])
    path.write_text(path.read_text().replace("namespaces:\n  - x\n", "namespaces: []\n"))
    security = Security.load(folder / "security.yaml")

    create = pb.CreateTableRequest(schema=pb.TableSchema(namespace="shop"))
    for method, request, roles in (
        ("GetStatus", pb.GetStatusRequest(), ("serve-read", "train", "admin")),
        ("CreateTable", create, ("train", "admin")),
        ("RegisterShard", pb.RegisterShardRequest(), ("admin",)),
    ):
        assert tuple(role for role in tokens if allows(tokens[role], COORDINATOR + method, request)) == roles
        assert not allows("no token", COORDINATOR + method, request)
    assert not allows(tokens["train"], "/sparserow.v1.Shard/Drain", pb.DrainRequest())
    assert not allows(tokens["train"], COORDINATOR + "NotYetInvented", pb.DrainRequest())
    assert not allows(ads, COORDINATOR + "CreateTable", create)
    create.schema.namespace = "ads"
    assert allows(ads, COORDINATOR + "CreateTable", create)
    assert allows(ads, COORDINATOR + "DropTable", pb.DropTableRequest(namespace="ads"))
    assert allows(ads, "/sparserow.v1.Rows/Push", rows_pb.PushRowsRequest(namespace="ads"))
    assert not allows(ads, "/sparserow.v1.Rows/Pull", rows_pb.PullRowsRequest(namespace="shop"))
    assert not allows(none, COORDINATOR + "CreateTable", create)  # [] is no namespace, and not all
    assert allows(none, COORDINATOR + "GetStatus", pb.GetStatusRequest())  # it is shown no table and no job
    assert security.native_server()["grants"][-1][2] == [""]
    assert not allows(tokens["serve-read"], "/sparserow.v1.Rows/Push", rows_pb.PushRowsRequest(namespace="ads"))
    assert not allows(ads, COORDINATOR + "DropTable", pb.DropTableRequest(namespace="shop"))
    assert not allows(ads, COORDINATOR + "Restore", pb.RestoreRequest())
    assert allows(ads, COORDINATOR + "GetStatus", pb.GetStatusRequest())
    check_call(Security(), COORDINATOR + "RegisterShard", None)  # tokens are not asked for


def test_every_method_that_has_a_role_is_one() -> None:
    protos = (changes_pb2, pb, rows_pb, serving_pb2)
    services = [service for proto in protos for service in proto.DESCRIPTOR.services_by_name.values()]
    methods = {f"{service.name}/{method.name}" for service in services for method in service.methods}
    assert set(access._ROLES) <= methods
    assert set(access._ROLES) >= access._OF_ALL_NAMESPACES
    own = {"RegisterShard", "ShardHeartbeat"}  # what only servers say to each other, as all of the service Shard
    rest = {method for method in methods - set(access._ROLES) if not method.startswith("Shard/")}
    assert rest == {f"Coordinator/{name}" for name in own}


def test_bearer_tokens() -> None:
    assert bearer_token([("authorization", "Bearer  abc ")]) == "abc"
    assert bearer_token([("authorization", "bearer abc")]) == "abc"
    for metadata in (None, [], [("authorization", "Basic abc")], [("authorization", "")]):
        assert bearer_token(metadata) == ""
