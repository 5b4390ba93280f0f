"""``sparserow status`` and ``top`` on a real cluster under load: figures, JSON, a terminal that is left as it was."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import sparserow as sr
from sparserow.deploy.cli import main
from sparserow.deploy.launch.local_serving import local_serving
from sparserow.deploy.observe import live_screen
from sparserow.proto.control import ControlClient
from sparserow.proto.published.registry import ModelRegistry
from sparserow.proto.status.cluster_status import view_of
from sparserow.proto.status.follower_view import FollowerView, follower_views
from sparserow.proto.status.job_view import JobView, job_views
from sparserow.worker.data import write_click_log
from sparserow_process import DEADLINE_SEC, Launcher, wait_until

HOT = 77


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cluster whose table is pulled all the time, key 77 by every pull."""
    with sr.local_cluster(shards=2) as cluster, sr.connect(cluster.address, "ads", staleness=None) as session:
        table = session.create_table("user", dim=4, optimizer=sr.optim.SGD(lr=0.5))
        table.assign(np.arange(5000), np.ones((5000, 4), np.float32))
        session.save(f"file://{tmp_path_factory.mktemp('ckpt')}")
        stop = threading.Event()

        def load() -> None:
            random = np.random.default_rng(1)
            while not stop.wait(0.002):
                table.pull(np.append(random.integers(1000, 5000, 9), HOT))

        thread = threading.Thread(target=load)
        thread.start()
        yield cluster.address
        stop.set()
        thread.join()


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def test_status_shows_load_checkpoint_hot_keys_and_skew(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    deadline = time.monotonic() + DEADLINE_SEC
    while True:  # until enough keys are sampled, and pulls came while it looked
        assert run("status", "--coordinator", address, "--json", str(tmp_path / "s.json")) == 0
        figures = json.loads((tmp_path / "s.json").read_text())
        hottest = figures["hot_keys"][:1]
        pulled = sum(shard["rows_pulled_per_sec"] for shard in figures["shards"])
        if [each["key"] for each in hottest] == [HOT] and hottest[0]["share"] > 0.05 and pulled > 0:
            break
        assert time.monotonic() < deadline, (hottest, pulled)
    text = capsys.readouterr().out
    for words in ("requests/s", "p99", "newest checkpoint", "skew between shards", "asked for most", "stale p50/p99"):
        assert words in text, text
    assert figures["hot_keys"][0]["table"] == "ads/user"
    assert 0 <= figures["checkpoint_age_sec"] < 600
    assert figures["checkpoint_links"] == 1
    assert all(shard["pulls_waiting"] == 0 for shard in figures["shards"])
    assert sum(shard["rows"] for shard in figures["shards"]) == 5000
    pulls = [times for shard in figures["shards"] for times in shard["times"] if times["kind"] == "pull"]
    assert pulls
    assert all(times["p99_sec"] is None or times["p99_sec"] >= times["p50_sec"] > 0 for times in pulls)
    assert 1 <= figures["skew"]["rows"] < 2


def test_json_instead_of_the_screen(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status", "--coordinator", address, "--over=0s", "--json", "-") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["ready"]
    assert figures["shards"][0]["requests_per_sec"] is None
    assert figures["serving"] == []


def test_a_serving_process_that_is_away_is_told(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status", "--coordinator", address, "--over=0s", "--serving", "127.0.0.1:1") == 1
    assert "serving process 127.0.0.1:1" in " ".join(capsys.readouterr().out.split())


def test_top_once_and_its_mistakes(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("top", "--coordinator", address, "--once", "--every=0.1s") == 0
    assert "ads/user" in capsys.readouterr().out
    assert run("top", "--coordinator", address, "--every=0s") == 1
    assert "--every: '0s' is not allowed; allowed: 0.1s to 1h" in capsys.readouterr().err
    assert run("top", "--coordinator", address) == 1
    assert "top: needs a terminal" in capsys.readouterr().err


def test_ctrl_c_while_the_screen_is_drawn_waits_until_it_is() -> None:
    with live_screen._ctrl_c() as ctrl_c:
        signal.raise_signal(signal.SIGINT)  # what draws goes on
        with pytest.raises(KeyboardInterrupt), ctrl_c.ends_it():
            pytest.fail("no other look is taken")
    with live_screen._ctrl_c() as ctrl_c, pytest.raises(KeyboardInterrupt), ctrl_c.ends_it():
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("end", ["q", "ctrl-c"])
def test_top_lives_in_a_terminal_and_leaves_it_as_it_was(address: str, end: str) -> None:
    main_end, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    command = [sys.executable, "-m", "sparserow.deploy.cli", "top", f"--coordinator={address}", "--every=0.2s"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150", "LINES": "50"}
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=subprocess.PIPE, env=environment, start_new_session=True
    )
    shown, deadline = b"", time.monotonic() + DEADLINE_SEC
    try:
        while shown.count(b"ads/user") < 2:  # it was refreshed
            assert time.monotonic() < deadline, shown
            if select.select([main_end], [], [], 0.5)[0]:
                shown += os.read(main_end, 65536)
        assert termios.tcgetattr(terminal)[3] & termios.ECHO == 0
        if end == "q":
            os.write(main_end, b"q")
        else:
            process.send_signal(signal.SIGINT)
        while process.poll() is None:
            assert time.monotonic() < deadline
            if select.select([main_end], [], [], 0.2)[0]:
                shown += os.read(main_end, 65536)
        while select.select([main_end], [], [], 0)[0]:  # what it wrote after the last look
            shown += os.read(main_end, 65536)
        assert process.returncode == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert termios.tcgetattr(terminal) == before
    finally:
        process.kill()
        process.wait()
        os.close(main_end)
        os.close(terminal)
    assert shown.count(b"\x1b[?1049h") == shown.count(b"\x1b[?1049l") == 1  # the other screen, and back


def test_top_scrolls_to_what_lies_below(address: str) -> None:
    main_end, terminal = pty.openpty()
    command = [sys.executable, "-m", "sparserow.deploy.cli", "top", f"--coordinator={address}", "--every=30s"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "12"}
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=subprocess.PIPE, env=environment, start_new_session=True
    )
    shown, deadline = b"", time.monotonic() + DEADLINE_SEC

    def read_until(words: bytes) -> None:
        nonlocal shown
        while words not in shown:
            assert time.monotonic() < deadline, shown
            if select.select([main_end], [], [], 0.5)[0]:
                shown += os.read(main_end, 65536)

    try:
        read_until(b"lines 1 to 11 of ")
        assert b"lease left" not in shown, "jobs are below the first page"
        for keys, words in (
            (b"\x1b[F", b"lease left"),
            (b"\x1b[H", b"lines 1 to 11 of "),
            (b"\x1b[B", b"lines 2 to 12 of "),
        ):
            shown = b""
            os.write(main_end, keys)  # long before the next look
            read_until(words)
        os.write(main_end, b"\x1b[6~q")
        assert process.wait(DEADLINE_SEC) == 0
    finally:
        process.kill()
        process.wait()
        os.close(main_end)
        os.close(terminal)


def test_one_namespace_alone(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with sr.connect(address, "feed") as session:
        session.create_table("item", dim=2, optimizer=sr.optim.SGD(lr=0.5))
        for command in (["top", "--once", "--every=0.1s"], ["status", "--over=0s"]):
            assert run(*command, "--coordinator", address, "--namespace", "feed") == 0
            shown = capsys.readouterr().out
            assert "feed/item" in shown
            assert "ads/" not in shown
            assert run(*command, "--coordinator", address, "--namespace", "fed") == 1
            assert (
                "--namespace 'fed': the cluster has no table, job or fault of it; namespaces: ads, feed"
                in capsys.readouterr().err
            )


def test_list_shows_the_models_of_one_namespace(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = str(tmp_path)
    assert run("publish", "ctr", "--root", root, "--namespace", "ads", "--coordinator", address) == 0
    capsys.readouterr()
    assert run("list", "--root", root, "--namespace", "ads") == 0
    assert "ctr" in capsys.readouterr().out
    assert run("list", "--root", root, "--namespace", "feed") == 0
    assert capsys.readouterr().out == f"no models of namespace feed at {root}\n"


def test_a_job_reports_its_samples_and_its_loss(launcher: Launcher, tmp_path: Path) -> None:
    log = write_click_log(tmp_path, rows=40_000, test_rows=500, seed=1)
    job = Path(__file__).resolve().parents[2] / "deploy" / "jobs" / "criteo.yaml"
    with sr.local_cluster(shards=1, worker_lease=2.0) as cluster, ControlClient(cluster.address) as control:
        settings = (f"data.train={log.train}", f"data.test={log.test}", f"cluster={{address: '{cluster.address}'}}",
                    "model.args.rows={'*': 3000}", "model.min_rows=1", "train.batch_size=64", "train.threads=1",
                    "publish.local=null", "train.epochs=20")  # fmt: skip
        run = launcher.start("train", str(job), *(f"--set={each}" for each in settings))
        wait_until(
            lambda: any(each.members and each.members[0].figures.samples for each in control.status().jobs),
            "samples",
            120,
        )

        def view() -> JobView:
            (found,) = job_views(None, control.status(), 0.0)
            return found

        wait_until(lambda: view().loss is not None and view().auc is not None, "rates between two heartbeats", 60)
        found = view()
        assert found.samples_per_sec is not None
        assert found.samples_per_sec > 64
        assert found.loss is not None
        assert 0.1 < found.loss < 1
        assert found.auc is not None
        assert 0.4 < found.auc < 1
        wait_until(lambda: view().test_metric == "auc", "the test after an epoch", 120)
        assert 0.4 < (view().test_value or 0) < 1
        run.popen.kill()


def test_a_serving_process_reports_its_freshness() -> None:
    with (
        sr.local_cluster(shards=2) as cluster,
        ControlClient(cluster.address) as control,
        sr.connect(cluster.address, "ads", staleness=None) as session,
    ):
        table = session.create_table("user", dim=4, optimizer=sr.optim.SGD(lr=0.5))
        table.assign(np.arange(500), np.ones((500, 4), np.float32))
        session.flush()
        with local_serving("now", follow=cluster.address, namespace="ads"):

            def follower() -> FollowerView | None:
                table.push(np.arange(500), np.ones((500, 4), np.float32))
                session.flush()
                views = follower_views(control.status())
                return views[0] if len(views) == 1 and views[0].fresh_p99_sec is not None else None

            wait_until(follower, "a follower that says how fresh it is", 60)
            view = follower()
            assert view is not None
            assert view.shards == 2
            assert view.model.startswith("now@")
            assert view.behind_sec is not None
            assert view.fresh_p50_sec is not None
            assert 0 <= view.fresh_p50_sec <= (view.fresh_p99_sec or 0)
            assert view.goal_sec == 10
            shards = view_of(None, control.status(), 0.0).shards
            assert all(0 <= (each.followers_behind_sec or -1) < 60 for each in shards)
        wait_until(lambda: not follower_views(control.status()), "the end of the process", 30)


def test_a_serving_process_names_the_aliases_of_its_versions(tmp_path: Path) -> None:
    root = str(tmp_path)
    with sr.local_cluster(shards=1) as cluster, ControlClient(cluster.address) as control:
        with sr.connect(cluster.address, "ads", staleness=None) as session:
            session.create_table("user", dim=4, optimizer=sr.optim.SGD(lr=0.5)).assign(np.arange(9), np.ones((9, 4)))
            for _ in range(2):
                session.publish("ctr", root=root)
        registry = ModelRegistry(root)
        registry.point("ctr", "live", 1)
        with local_serving("ctr", root=root, follow=cluster.address, poll="20ms"):

            def aliases() -> dict[str, str]:
                return {view.model: view.aliases for view in follower_views(control.status())}

            wait_until(lambda: aliases() == {"ctr@1": "live"}, "the alias", 30)
            registry.canary("ctr", "live", 2, 0.25)
            wait_until(lambda: aliases() == {"ctr@1": "live", "ctr@2": "live (25% canary)"}, "the canary", 30)
            registry.point("ctr", "live", 2)
            wait_until(lambda: aliases().get("ctr@2") == "live", "the move", 30)
