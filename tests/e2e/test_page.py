"""The page of a running cluster in a headless Chromium: with TLS and tokens, a job, a killed shard, a coordinator that
goes away.
"""

from __future__ import annotations

import json
import signal
import ssl
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import sparserow as sr
from browser import Browser, browser
from sparserow.deploy.cli import main
from sparserow.deploy.launch.security_files import add_token, init_security
from sparserow.deploy.observe.two_readings import look
from sparserow.proto.control import ControlClient
from sparserow.proto.process.whole_file import write_whole
from sparserow.proto.security.security import Security
from sparserow_process import Launcher, Process, free_ports, wait_until

LEASE = "--shard-lease=2s"
ROWS = 100


@dataclass
class Scene:
    """A cluster of two shards with a table of ads, and a job of the namespace hosts.

    Attributes:
        points: the length of the job's curve when it was first looked at.
    """

    launcher: Launcher
    folder: Path
    address: str
    url: str
    tokens: dict[str, str]
    coordinator: Process
    shards: list[Process]
    points: int = 0

    def security(self, name: str) -> str:
        return str(self.folder / "files" / f"{name}.yaml")

    def start_coordinator(self) -> Process:
        ports = (f"--port={self.address.rpartition(':')[2]}", f"--page-port={self.url.rpartition(':')[2].rstrip('/')}")
        state, root = f"--state={self.folder}/state.json", f"--checkpoint-root={self.folder}"
        process = self.launcher.start("coordinator", "--shards=2", *ports, LEASE, state, root)
        assert process.wait_for(r"page at (\S+)\n")[1] == self.url
        return process

    def start_shard(self, index: int) -> Process:
        return self.launcher.start("ps", f"--coordinator={self.address}", f"--shard={index}")

    def document(self) -> Any:
        """What `status --json` writes at this moment."""
        path = self.folder / "status.json"
        with pytest.raises(SystemExit):
            main(["--security", self.security("all"), "status", f"--coordinator={self.address}", "--json", str(path)])
        sr.use_security(None)
        return json.loads(path.read_text())


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("page")
    files = init_security(folder / "files", ["127.0.0.1"], valid_sec=3600)
    tokens = {}
    for name, namespaces in (("all", ()), ("ads", ("ads",))):
        tokens[name] = add_token(folder / "files" / "tokens.yaml", name, "train", namespaces)
        write_whole(folder / "files" / f"{name}.token", tokens[name], mode=0o600)
        (folder / "files" / f"{name}.yaml").write_text(f"ca: ca.pem\ntoken_file: {name}.token\n")
    launcher = Launcher(folder)
    launcher.environment["SPARSEROW_SECURITY"] = str(files)
    port, page = free_ports(2)
    made = Scene(launcher, folder, f"127.0.0.1:{port}", f"https://127.0.0.1:{page}/", tokens, None, [])  # type: ignore[arg-type]
    try:
        made.coordinator = made.start_coordinator()
        made.shards = [made.start_shard(index) for index in range(2)]
        with ControlClient(made.address, security=Security.load(made.security("all"))) as control:
            wait_until(lambda: control.status().ready, "a cluster that is ready")
        with sr.connect(made.address, "ads", security=made.security("all")) as session:
            session.create_table("user", dim=4, optimizer=sr.optim.SGD(lr=0.5))
        arguments = (made.address, made.security("all"), 0, 1, "none", ROWS, folder / "stop", f"file://{folder}/rows")
        launcher.start_script("counting_worker.py", *map(str, arguments)).wait_for("acknowledged")
        yield made
    finally:
        launcher.kill_all()


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def enter(chrome: Browser, token: str) -> None:
    chrome.wait_for(lambda: not chrome.run("return document.getElementById('ask').hidden"), "a question for the token")
    chrome.driver.find_element("id", "token").send_keys(token, "\n")


def show(chrome: Browser, screen: str, title: str) -> None:
    chrome.run("location.hash = arguments[0]", screen)
    chrome.wait_for(lambda: chrome.text("h1") == title, f"the screen {screen}")


def wrong(chrome: Browser) -> str:
    return chrome.text("#wrong")


def curve(chrome: Browser) -> int:
    """The number of points of the job's curve, when it has more than one."""
    points = "return document.querySelector('#steps-0 polyline')?.getAttribute('points') || ''"
    return len(str(chrome.run(points)).split())


def test_it_loads_asks_for_a_token_and_refuses_a_wrong_one(scene: Scene, chrome: Browser) -> None:
    chrome.open(scene.url)
    chrome.wait_for(lambda: chrome.text("#why") == "The coordinator asks for a token.", "a question for the token")
    assert chrome.text("main") == ""
    assert chrome.errors() == []
    assert chrome.requests() == [scene.url]
    enter(chrome, "not a token")
    chrome.wait_for(lambda: chrome.text("#why") == "The coordinator does not take this token.", "a second question")
    assert chrome.text("main") == ""
    chrome.errors()  # the browser logs the status 401
    enter(chrome, scene.tokens["all"])
    chrome.wait_for(lambda: chrome.text("h1") == "Cluster", "figures")
    assert f"at {scene.address}: ready" in chrome.text("#identity")
    assert chrome.errors() == []
    assert set(chrome.requests()) == {f"{scene.url}status.json"}
    stored = "return [document.cookie, JSON.stringify(localStorage), JSON.stringify(sessionStorage), location.href]"
    assert chrome.run(stored) == ["", "{}", "{}", scene.url]


def test_its_figures_are_those_of_status(scene: Scene, chrome: Browser) -> None:
    document = scene.document()
    request = urllib.request.Request(f"{scene.url}status.json")
    request.add_header("Authorization", f"Bearer {scene.tokens['all']}")
    authority = ssl.create_default_context(cafile=str(scene.folder / "files" / "ca.pem"))
    with urllib.request.urlopen(request, timeout=60, context=authority) as reply:
        sent = json.load(reply)["status"]
    assert sent.keys() == document.keys()
    for name in ("shards", "tables", "jobs"):
        assert [each.keys() for each in sent[name]] == [each.keys() for each in document[name]]
    for name in ("cluster_id", "ready", "slots", "route_epoch", "wrong", "faults", "serving", "damaged_checkpoints"):
        assert sent[name] == document[name], name
    show(chrome, "tables", "Tables")
    of_status = [
        [
            each["table"],
            str(each["rows"]),
            str(each["added"]),
            f"{each['dim']} \N{MULTIPLICATION SIGN} {each['dtype']}, {each['optimizer']}",
        ]
        for each in document["tables"]
    ]
    assert [[row[0], row[1], row[5], row[12]] for row in chrome.cells("#tables-table")] == of_status
    assert [row[:2] for row in of_status] == [["ads/user", "0"], ["hosts/rows", str(ROWS)]]
    show(chrome, "cluster", "Cluster")
    shards = chrome.cells("#shards")
    of_status = [
        [str(each["shard"]), each["state"], f"{each['address']} (process {each['pid']})", str(each["rows"])]
        for each in document["shards"]
    ]
    assert [row[:4] for row in shards] == of_status
    assert [each["pid"] for each in document["shards"]] == [shard.popen.pid for shard in scene.shards]
    show(chrome, "jobs", "Jobs")
    scene.points = curve(chrome)
    show(chrome, "checkpoints", "Checkpoints")
    chrome.wait_for(lambda: f"{scene.folder}/rows/" in chrome.text("main"), "the newest checkpoint")
    assert chrome.errors() == []


def test_a_token_of_a_namespace_sees_its_own(scene: Scene, chrome: Browser) -> None:
    chrome.open(scene.url)
    enter(chrome, scene.tokens["ads"])
    chrome.wait_for(lambda: chrome.text("h1") == "Cluster", "figures")
    assert "namespaces ads" in chrome.text("#identity")
    for screen, title in (("tables", "Tables"), ("jobs", "Jobs"), ("checkpoints", "Checkpoints")):
        show(chrome, screen, title)
        assert "hosts" not in chrome.text("body")
        assert str(scene.folder) not in chrome.text("body")
        if screen == "tables":
            assert [row[0] for row in chrome.cells("#tables-table")] == ["ads/user"]
    with ControlClient(scene.address, security=Security.load(scene.security("ads"))) as control:
        assert [each.table for each in look(control, 0)[1].tables] == ["ads/user"]


def test_a_killed_shard_is_named_and_named_well_again(scene: Scene, chrome: Browser) -> None:
    chrome.open(f"{scene.url}#cluster")
    enter(chrome, scene.tokens["all"])
    chrome.wait_for(lambda: "Nothing" in wrong(chrome), "a cluster that is well")
    scene.shards[1].signal(signal.SIGKILL)
    began = time.monotonic()
    chrome.wait_for(lambda: "shard 1" in wrong(chrome), "the name of the killed shard")
    print(f"the killed shard was named after {time.monotonic() - began:.1f} s")
    chrome.wait_for(lambda: "not ready: shard 1: its process sends no heartbeat" in wrong(chrome), "the lost shard")
    assert f"sparserow ps --coordinator {scene.address} --shard 1" in wrong(chrome)
    assert [row[:2] for row in chrome.cells("#shards")] == [["1", "lost"], ["0", "serving"]]
    show(chrome, "checkpoints", "Checkpoints")
    assert "not ready: shard 1" in wrong(chrome)
    scene.shards[1] = scene.start_shard(1)
    chrome.wait_for(lambda: "not ready" not in wrong(chrome), "the shard's return")
    show(chrome, "cluster", "Cluster")
    assert [row[1] for row in chrome.cells("#shards")] == ["serving", "serving"]


def test_the_curve_of_a_job_has_grown(scene: Scene, chrome: Browser) -> None:
    show(chrome, "jobs", "Jobs")
    assert chrome.text("#steps-0 h2") == "hosts/hosts: step"
    chrome.wait_for(lambda: curve(chrome) > scene.points, "a longer curve than before the shard was killed")
    assert "now " in chrome.text("#steps-0 figcaption")
    assert chrome.cells("#workers")[0][:2] == ["hosts/hosts", "0"]
    show(chrome, "cluster", "Cluster")


def test_the_coordinator_goes_away_and_comes_back(scene: Scene, chrome: Browser) -> None:
    scene.coordinator.signal(signal.SIGKILL)
    scene.coordinator.end()
    chrome.wait_for(lambda: "the coordinator cannot be reached" in chrome.text("#link"), "the lost coordinator")
    assert "No figures for " in chrome.text("#link")
    assert [row[1] for row in chrome.cells("#shards")] == ["serving", "serving"], "the last figures stay"
    scene.coordinator = scene.start_coordinator()
    chrome.wait_for(lambda: chrome.run("return document.getElementById('link').hidden"), "the coordinator's return")
    chrome.wait_for(lambda: "not ready" not in wrong(chrome), "shards that are in touch again")
