"""URLs that a peer names: which ones a coordinator opens, and that none is opened before it is allowed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparserow as sr
from sparserow.deploy.launch.security_files import add_token, init_security
from sparserow.proto import control_pb2 as pb
from sparserow.proto.checkpoint.urls import check_url, is_inside
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import FailedPrecondition, InvalidArgument, NotFound, PermissionDenied
from sparserow.proto.process.whole_file import write_whole
from sparserow.proto.security.security import Security, use_security
from sparserow.ps_server.coordinator.state.checkpoint_roots import CheckpointRoots
from sparserow_process import Launcher, Process, free_port, wait_until

CALLER = pb.CheckpointCaller()
CALLS: dict[str, Callable[[str], Any]] = {
    "BeginSave": lambda url: pb.BeginSaveRequest(url=url, caller=CALLER),
    "EnterSave": lambda url: pb.EnterSaveRequest(url=url, name="save-000001", caller=CALLER),
    "GetSave": lambda url: pb.GetSaveRequest(url=url, name="save-000001"),
    "Restore": lambda url: pb.RestoreRequest(url=url, caller=CALLER),
}
ALWAYS_REFUSED = [
    "",
    "data:application/json;base64,e30=",
    "data://x",
    "reference://",
    "reference::http://127.0.0.1:{port}/x",
    "reference::data:application/json,%7B%7D",
    "simplecache::s3://bucket/x",
    "filecache::http://127.0.0.1:{port}/x",
    "http://127.0.0.1:{port}/x",
    "https://127.0.0.1:{port}/x",
    "ftp://127.0.0.1:{port}/x",
    "zip://a::/tmp/b.zip",
    "/tmp/../etc",
    "/tmp/a/..",
    "file:///tmp/../etc",
    "s3://bucket/../other",
    "s3://bucket/a*",
    "s3://",
    "relative/folder",
    "~/folder",
    "C:\\folder",
    "/tmp/a\nINFO coordinator: forged",
    "/tmp/a\x00b",
    "/tmp/a\x1b[2J",
    "/" + "x" * 5000,
]


class Listener:
    """A host that takes connections and says nothing; counts them."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        taken = []
        while True:
            try:
                taken.append(self._server.accept()[0])
            except OSError:
                return
            self.connections += 1

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.close()


@pytest.fixture
def as_process() -> Iterator[None]:
    """Gives this process's identity back at the end."""
    yield
    use_security(None)


class Cluster:
    """A coordinator and its shard from the command line, with a token of role train where there are tokens."""

    def __init__(self, launcher: Launcher, folder: Path, *, has_tokens: bool, roots: tuple[str, ...] = ()) -> None:
        self._security: list[str] = []
        self.token: Security | None = None
        if has_tokens:
            home = folder / "security"
            self._security = [f"--security={init_security(home, ['127.0.0.1'], valid_sec=3600)}"]
            self.token = self._make_token(home, "trainer")
            self.narrow = self._make_token(home, "narrow", "ads")
        port = free_port()
        arguments = (f"--port={port}", "--shards=1", "--slot-count=64")
        named = (f"--checkpoint-root={root}" for root in roots)
        self.process: Process = launcher.start(*self._security, "coordinator", *arguments, *named)
        self.address = f"127.0.0.1:{port}"
        self.process.wait_for("coordinator at ")
        launcher.start(*self._security, "ps", f"--coordinator={self.address}", "--shard=0")
        with self.control() as control:
            wait_until(lambda: self._is_ready(control), "the cluster")

    @staticmethod
    def _make_token(home: Path, name: str, *namespaces: str) -> Security:
        write_whole(home / f"{name}.token", add_token(home / "tokens.yaml", name, "train", namespaces), mode=0o600)
        (home / f"{name}.yaml").write_text(f"ca: ca.pem\ntoken_file: {name}.token\n")
        return Security.load(home / f"{name}.yaml")

    def _is_ready(self, control: ControlClient) -> bool:
        try:
            return bool(control.status().ready)
        except sr.errors.SparserowError:
            return False

    def control(self, security: Security | None = None) -> ControlClient:
        return ControlClient(self.address, security=security or self.token)

    def call(self, name: str, url: str, security: Security | None = None) -> Any:
        with self.control(security) as control:
            return control._call(name, CALLS[name](url), deadline_sec=20.0)


@pytest.mark.parametrize("url", ALWAYS_REFUSED)
def test_a_url_that_is_always_refused(url: str) -> None:
    for roots in ((), ("/",), ("/tmp", "s3://bucket")):
        with pytest.raises(InvalidArgument, match=r"^url: .*allowed: ") as caught:
            CheckpointRoots(roots).check(url)
        assert str(caught.value).isprintable()


def test_urls_are_compared_as_strings() -> None:
    assert check_url("url", "/a//b/./c/") == "/a/b/c"
    assert check_url("url", "//a") == "/a"
    assert check_url("url", "file:///a/b/") == "/a/b"
    assert check_url("url", "s3://bucket/x/") == "s3://bucket/x"
    assert is_inside("/a/b", "/a")
    assert is_inside("/a", "/a")
    assert is_inside("/a", "/")
    assert not is_inside("/ab", "/a")
    assert not is_inside("s3://bucket-2/x", "s3://bucket")
    assert not is_inside("/bucket/x", "s3://bucket")


def test_what_a_coordinator_without_tokens_takes(as_process: None) -> None:
    open_roots = CheckpointRoots()
    for url in ("/ckpt", "file:///ckpt", "s3://bucket/x", "gs://bucket/x", "memory://x"):
        open_roots.check(url)
    with pytest.raises(InvalidArgument, match="checkpoint_roots"):
        open_roots.check("gated://x")
    CheckpointRoots(["gated://x"]).check("gated://x/y")
    words = r"is reached by other machines and has no checkpoint_roots.*--checkpoint-root"
    with pytest.raises(FailedPrecondition, match=words):
        CheckpointRoots(is_loopback=False).check("/ckpt")
    use_security(Security(tokens=()))
    with pytest.raises(FailedPrecondition, match=r"asks for tokens and has no checkpoint_roots.*--checkpoint-root"):
        open_roots.check("/ckpt")
    assert CheckpointRoots(["/ckpt/"]).check("/ckpt//jobs/") == "/ckpt/jobs"
    for url in ("/ckpt2", "/", "/tmp", "s3://ckpt"):
        with pytest.raises(FailedPrecondition, match="is below no folder of checkpoint_roots; allowed: /ckpt"):
            CheckpointRoots(["/ckpt"]).check(url)
    with pytest.raises(InvalidArgument, match=r"^checkpoint_roots: "):
        CheckpointRoots(["http://x/y"])


def test_no_call_opens_a_url_that_is_refused(launcher: Launcher, tmp_path: Path, listener: Listener) -> None:
    """Neither a silent host nor a chain of file systems holds the coordinator up, and no log line is forged."""
    cluster = Cluster(launcher, tmp_path, has_tokens=False)
    begun = time.monotonic()
    with cluster.control() as control:
        for name, request in CALLS.items():
            for url in ALWAYS_REFUSED:
                with pytest.raises(InvalidArgument, match=r"^url: "):
                    control._call(name, request(url.format(port=listener.port)), deadline_sec=20.0)
    assert time.monotonic() - begun < 60
    assert listener.connections == 0
    assert "\nINFO coordinator: forged" not in cluster.process.err
    with sr.connect(cluster.address, "ads", staleness=None) as session:
        for url in ALWAYS_REFUSED[1:]:
            with pytest.raises((InvalidArgument, FailedPrecondition)):
                cluster_keep(session, url.format(port=listener.port))
    assert listener.connections == 0


def cluster_keep(session: sr.Session, url: str) -> None:
    """KeepRows as a crafted client sends it."""
    from sparserow.worker.checkpoint.save import cluster_of

    control, identity = cluster_of(session, "keep_rows")
    control.keep_rows(url, identity, every_sec=30.0)


def test_a_token_needs_roots(launcher: Launcher, tmp_path: Path) -> None:
    cluster = Cluster(launcher, tmp_path, has_tokens=True)
    for name in ("BeginSave", "Restore"):
        with pytest.raises(FailedPrecondition, match=r"has no checkpoint_roots; start it with --checkpoint-root"):
            cluster.call(name, str(tmp_path / "ckpt"))
    assert not (tmp_path / "ckpt").exists()
    with pytest.raises(NotFound, match=r"save 'save-000001' to .* is not under way"):
        cluster.call("GetSave", str(tmp_path / "ckpt"))
    with pytest.raises(PermissionDenied, match="GetSave needs a token that reaches all namespaces"):
        cluster.call("GetSave", str(tmp_path / "ckpt"), cluster.narrow)


def test_a_token_saves_below_the_roots_alone(launcher: Launcher, tmp_path: Path) -> None:
    """Others' checkpoints, outside of the roots, stay as they are: ``keep`` removes none of them."""
    others = tmp_path / "others"
    for number in (1, 2, 3):
        (others / f"save-{number:06d}").mkdir(parents=True)
        (others / f"save-{number:06d}" / "manifest.json").write_text("{}")
    root = tmp_path / "ckpt"
    cluster = Cluster(launcher, tmp_path, has_tokens=True, roots=(str(root),))
    for name in ("BeginSave", "Restore"):
        for url in (str(others), f"{root}-2", str(tmp_path), "/"):
            with pytest.raises(FailedPrecondition, match="is below no folder of checkpoint_roots"):
                cluster.call(name, url)
    with sr.connect(cluster.address, "ads", staleness=None, security=cluster.token) as session:
        for url in (str(others), "/"):
            with pytest.raises(FailedPrecondition, match="is below no folder of checkpoint_roots"):
                cluster_keep(session, url)
        keys = np.arange(10, dtype=np.uint64)
        table = session.create_table("user", dim=2, optimizer=sr.optim.SGD())
        table.assign(keys, np.ones((10, 2), np.float32))
        session.save(str(root / "ads"))
        table.assign(keys, np.zeros((10, 2), np.float32))
        session.restore(f"{root}//ads/")
        np.testing.assert_array_equal(session.table("user").pull(keys), np.ones((10, 2)))
    assert sorted(path.name for path in others.iterdir()) == ["save-000001", "save-000002", "save-000003"]
    assert not (others / "save-000004").exists()
