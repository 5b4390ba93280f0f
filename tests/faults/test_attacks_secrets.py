"""Secrets that change while a cluster works: no process ends, no row and no step is lost."""

from __future__ import annotations

import contextlib
import shutil
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

import sparserow as sr
from sparserow.deploy.launch.security_files import add_token, init_security, revoke_token, sign_certificate
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import PermissionDenied
from sparserow.proto.process.whole_file import write_whole
from sparserow.proto.security.security import Security
from sparserow_process import DEADLINE_SEC, Launcher, wait_until

KEYS = np.arange(50, dtype=np.uint64)
DIM = 4
READ_SEC = 2.0  # processes look at their files each second
LEASE_SEC = 10.0  # a worker looks at its files thrice as often


class Scene:
    """A cluster of two shards with TLS and tokens, and the folder of its files."""

    def __init__(self, folder: Path) -> None:
        self.path = init_security(folder, ["127.0.0.1"], valid_sec=3600)
        self.folder = folder
        self.tokens = folder / "tokens.yaml"
        self.trainer = folder / "trainer.yaml"
        write_whole(folder / "trainer.token", add_token(self.tokens, "trainer", "train", ()), mode=0o600)
        self.trainer.write_text("ca: ca.pem\ntoken_file: trainer.token\n")

    def look(self, cluster: sr.LocalCluster) -> None:
        self.address = cluster.address
        host, _, port = cluster.address.rpartition(":")
        self.at = [(host, int(port)), *((shard.host, shard.port) for shard in cluster.shards)]
        self.processes = {process.pid for process in psutil.Process().children(recursive=True)}

    def now(self) -> Security:
        """The files of the operator as they are now."""
        return Security.load(self.path)

    def certificates(self) -> set[str]:
        """Those that the coordinator and the data planes show."""
        return {ssl.get_server_certificate(at, timeout=60) for at in self.at}

    def problems(self) -> list[str]:
        """What the status says of the files of each process."""
        with ControlClient(self.address, security=Security.load(self.trainer)) as control:
            status = control.status()
        return [status.security_problem, *(shard.problem for shard in status.shards)]

    def check_alive(self) -> None:
        """Every process that was there is there."""
        alive = {process.pid for process in psutil.Process().children(recursive=True) if process.status() != "zombie"}
        assert self.processes <= alive


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path / "security")
    sr.use_security(made.path)
    try:
        running = sr.local_cluster(shards=2)
        with running as cluster:
            sr.use_security(None)
            made.look(cluster)
            yield made
            sr.use_security(made.path)
    finally:
        sr.use_security(None)


class Training:
    """A worker in a thread that takes steps until it is told to end; each step adds 1 to every value of its rows."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.steps = 0
        self.error: BaseException | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._train)

    def _train(self) -> None:
        try:
            with sr.connect(self._scene.address, "ads", job="train", security=self._scene.trainer) as session:
                table = session.create_table("user", dim=DIM, optimizer=sr.optim.SGD(lr=1.0))
                while not self._ended.is_set():
                    table.push(KEYS, -np.ones((len(KEYS), DIM), np.float32))
                    self.steps += 1
                    np.testing.assert_array_equal(table.pull(KEYS), np.full((len(KEYS), DIM), float(self.steps)))
        except BaseException as error:
            self.error = error

    def goes_on(self) -> None:
        """Returns when ten more steps have been made."""
        wanted = self.steps + 10
        wait_until(lambda: self.steps >= wanted or self.error is not None, "ten more steps")
        assert self.error is None, self.error

    def __enter__(self) -> Training:
        self._thread.start()
        self.goes_on()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(DEADLINE_SEC)
        assert not self._thread.is_alive()
        assert self.error is None, self.error


def replace_admin(scene: Scene) -> None:
    """Exchanges the admin token at once: no process has both at a time."""
    write_whole(scene.folder / "token", add_token(scene.tokens, "next admin", "admin", ()), mode=0o600)
    revoke_token(scene.tokens, "servers and operators")


def wait_until_ready(scene: Scene) -> None:
    """Returns when the coordinator takes the admin token of the files, and has reached every shard."""

    def is_ready() -> bool:
        with (
            contextlib.suppress(sr.errors.SparserowError),
            ControlClient(scene.address, security=scene.now()) as control,
        ):
            status = control.status()
            return status.ready and not any(shard.problem for shard in status.shards)
        return False

    wait_until(is_ready, "the new secrets everywhere")


def test_an_admin_token_that_is_exchanged_at_once_ends_no_shard(scene: Scene) -> None:
    with Training(scene) as training:
        replace_admin(scene)
        wait_until_ready(scene)
        training.goes_on()
        scene.check_alive()
    with sr.connect(scene.address, "ads", job="after", security=scene.trainer) as session:
        assert session.table("user").pull(KEYS)[0, 0] == training.steps


def test_each_secret_changes_while_a_job_trains(scene: Scene) -> None:
    """The order of docs/security.md, "Changing certificates and tokens"; :class:`Training` counts its steps."""
    with Training(scene) as training:
        for name, role, file in (("trainer", "train", "trainer.token"), ("servers and operators", "admin", "token")):
            token = add_token(scene.tokens, f"next {name}", role, ())  # type: ignore[arg-type]
            time.sleep(READ_SEC)
            write_whole(scene.folder / file, token, mode=0o600)
            time.sleep(READ_SEC + LEASE_SEC / 3)
            revoke_token(scene.tokens, name)
            time.sleep(READ_SEC)
            training.goes_on()
        before = scene.certificates()
        sign_certificate(scene.folder, "server", ["127.0.0.1"], valid_sec=3600)
        wait_until(lambda: scene.certificates().isdisjoint(before), "the new certificate everywhere")
        training.goes_on()

        former = scene.folder / "former"
        former.mkdir()
        for name in ("ca.pem", "ca.key"):
            shutil.copy(scene.folder / name, former / name)
        another = init_security(scene.folder / "another", ["127.0.0.1"], valid_sec=3600).parent
        write_whole(scene.folder / "ca.pem", (former / "ca.pem").read_text() + (another / "ca.pem").read_text())
        time.sleep(READ_SEC + LEASE_SEC / 3)
        before = scene.certificates()
        for name in ("server.key", "server.pem"):
            write_whole(scene.folder / name, (another / name).read_text(), mode=0o600)
        wait_until(lambda: scene.certificates().isdisjoint(before), "the certificate of the new authority everywhere")
        training.goes_on()
        write_whole(scene.folder / "ca.pem", (another / "ca.pem").read_text())
        time.sleep(READ_SEC + LEASE_SEC / 3)
        training.goes_on()
        wait_until_ready(scene)
        scene.check_alive()
        with sr.connect(scene.address, "ads", job="newcomer", security=scene.trainer) as session:
            session.table("user")


def test_a_client_of_serving_follows_its_token(scene: Scene, launcher: Launcher, tmp_path: Path) -> None:
    root = str(tmp_path / "models")
    with sr.connect(scene.address, "ads", job="publish", security=scene.path) as session:
        table = session.create_table("served", dim=DIM, optimizer=sr.optim.SGD(lr=1.0))
        table.assign(KEYS, np.ones((len(KEYS), DIM), np.float32))
        session.publish("ctr", root=root)
    launcher.environment["SPARSEROW_SECURITY"] = str(scene.path)
    serving = launcher.start("serve", f"--root={root}", "--model=ctr", "--port=0", f"--follow={scene.address}")
    ready = serving.wait_for(r"ready at gRPC (\S+),")
    with sr.ServingClient(ready[1], security=scene.trainer) as client:
        token = add_token(scene.tokens, "next trainer", "train", ())
        time.sleep(READ_SEC)
        write_whole(scene.folder / "trainer.token", token, mode=0o600)
        time.sleep(READ_SEC)
        revoke_token(scene.tokens, "trainer")
        replace_admin(scene)
        time.sleep(READ_SEC)
        assert client.lookup("served", KEYS).rows[0, 0] == 1.0
        wait_until_ready(scene)
        with sr.connect(scene.address, "ads", job="train", security=scene.trainer) as session:
            session.table("served").assign(KEYS, np.full((len(KEYS), DIM), 2.0, np.float32))
            wait_until(lambda: client.lookup("served", KEYS).rows[0, 0] == 2.0, "live sync goes on")


@pytest.mark.parametrize("text", ["", "# none yet\n", "tokens:\n- name: half"])
def test_a_tokens_file_that_is_no_whole_one_takes_no_token_back(scene: Scene, text: str) -> None:
    whole = scene.tokens.read_text()
    with Training(scene) as training:
        scene.tokens.write_text(text)
        wait_until(lambda: all("tokens.yaml" in problem for problem in scene.problems()), "the status of each process")
        training.goes_on()
        scene.tokens.write_text(whole)
        wait_until(lambda: not any(scene.problems()), "the status of each process")
        training.goes_on()


def test_an_empty_list_takes_all_tokens_back(scene: Scene) -> None:
    whole = scene.tokens.read_text()
    scene.tokens.write_text("tokens: []\n")

    def is_refused() -> bool:
        with contextlib.suppress(sr.errors.Unavailable), ControlClient(scene.address, security=scene.now()) as control:
            try:
                control.status()
            except PermissionDenied:
                return True
        return False

    wait_until(is_refused, "the revoked token to be refused")
    time.sleep(2 * READ_SEC)  # heartbeats are refused meanwhile
    scene.check_alive()
    scene.tokens.write_text(whole)
    wait_until_ready(scene)


def test_one_that_starts_with_a_wrong_token_ends(scene: Scene, launcher: Launcher) -> None:
    write_whole(scene.folder / "wrong.token", "not a token", mode=0o600)
    wrong = scene.path.read_text().replace("token_file: token", "token_file: wrong.token")
    (scene.folder / "wrong.yaml").write_text(wrong)
    launcher.environment["SPARSEROW_SECURITY"] = str(scene.folder / "wrong.yaml")
    shard = launcher.start("ps", f"--coordinator={scene.address}", "--shard=0", "--port=0")
    assert "not one that this server knows" in shard.error_line()
