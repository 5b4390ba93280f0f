"""``bench peers``: environments are made whole or anew, processes have an end, and a page tells what was measured."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from sparserow.deploy.bench import peer_contests, peers_report, peers_run
from sparserow.deploy.bench.peer_contests import CONTESTS
from sparserow.deploy.bench.peer_environments import default_folder, fitting, interpreters, python_of
from sparserow.deploy.bench.peer_processes import WORKER, PeerError, measured_by_worker
from sparserow.deploy.bench.peers.pins import ENVIRONMENTS, PEERS, PinnedEnvironment
from sparserow.deploy.bench.peers_run import PeerResult, PeersReport, chosen, run_peers
from sparserow.deploy.cli import main
from sparserow.proto.errors import InvalidArgument
from sparserow_process import wait_until

TINY = replace(
    peer_contests.QUICK, rows=500, keys=50, dims=(8,), served_rows=500, served_keys=50, rounds=1, repetitions=2
)
ASKED: dict[str, Any] = {
    "works": ["pull 8"],
    "rows": 100,
    "keys": 10,
    "repetitions": 2,
    "warm_up": 0,
    "threads": 1,
    "cpus": [],
}
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"


def script_of(folder: Path, measure: str) -> Path:
    """A peer's script; ``serve`` writes its process id to a file and does nothing for ten minutes."""
    path = folder / "peer.py"
    serve = f"""
        def serve(asked, tools):
            pathlib.Path({str(folder)!r}, "server.pid").write_text(str(os.getpid()))
            tools.ready("started")
            time.sleep(600)

        def fail(asked, tools):
            raise KeyError("no such row")

        def vanish(asked, tools):
            os._exit(4)
    """
    body = textwrap.indent(textwrap.dedent(measure), "    ")
    path.write_text(f"import os, pathlib, time\n{textwrap.dedent(serve)}\ndef measure(asked, tools):\n{body}\n")
    return path


def measured(folder: Path, measure: str, deadline_sec: float = 60.0) -> dict[str, Any]:
    script = script_of(folder, measure)
    return measured_by_worker(sys.executable, script, ASKED, log=folder / "peer.log", deadline_sec=deadline_sec)


def wait_for_end(path: Path) -> None:
    """Waits until the process whose id the file has is gone, or has ended and is not yet waited for."""
    pid = int(path.read_text())

    def has_ended() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    wait_until(has_ended, f"the process of {path.name} has ended")


def test_a_worker_gives_its_figures_and_its_prints_go_to_the_log(tmp_path: Path) -> None:
    found = measured(
        tmp_path,
        """
        print("a library prints")
        tools.start("serve")
        tools.versions["numpy"] = "2"
        tools.time("pull", 8, tools.batches().__next__, lambda keys: time.sleep(len(keys) / 1e4))
        tools.time("push", 8, tools.batches().__next__, lambda keys: 1 / 0)
        """,
    )
    assert found["versions"] == {"numpy": "2"}
    assert list(found["seconds"]) == ["pull 8"], "a work that is not asked for is not done"
    assert len(found["seconds"]["pull 8"]) == 2
    assert "a library prints" in (tmp_path / "peer.log").read_text()
    wait_for_end(tmp_path / "server.pid")


@pytest.mark.parametrize(
    ("measure", "reason"),
    [
        ('tools.ready("garbage"); os._exit(0)', "wrote no figures: JSONDecodeError"),
        ("os._exit(0)", "wrote no figures: IndexError"),
        ('tools.seconds["pull 8"] = []', "wrote no figures of pull 8"),
        ('raise ValueError("the rows are lost")', "ended with status 1: ValueError: the rows are lost"),
        ("os.abort()", "was ended by signal 6"),
        ('tools.start("fail")', "ended with status 1: RuntimeError: fail: KeyError: 'no such row'"),
        ('tools.start("vanish")', "ended with status 1: RuntimeError: vanish: the process ended with status 4"),
    ],
)
def test_a_worker_that_fails_has_a_reason_and_a_log(tmp_path: Path, measure: str, reason: str) -> None:
    with pytest.raises(PeerError) as failed:
        measured(tmp_path, f'tools.start("serve")\n{measure}')
    assert failed.value.reason.startswith(reason)
    assert failed.value.log == tmp_path / "peer.log"
    assert f"its output is in {tmp_path / 'peer.log'}" in str(failed.value)
    wait_for_end(tmp_path / "server.pid")


def test_a_worker_that_hangs_is_ended_at_its_deadline_with_its_server(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"did not end within 2 s"):
        measured(tmp_path, 'tools.start("serve"); time.sleep(600)', deadline_sec=2.0)
    wait_for_end(tmp_path / "server.pid")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_the_run(tmp_path: Path, number: signal.Signals) -> None:
    script = script_of(
        tmp_path,
        """
        pathlib.Path(__file__).with_name("worker.pid").write_text(str(os.getpid()))
        tools.start("serve")
        time.sleep(600)
        """,
    )
    program = f"""
import pathlib, sys
from sparserow.deploy.bench.peer_processes import measured_by_worker
from sparserow.deploy.launch.termination import interrupted_by_termination
with interrupted_by_termination():
    log, script = pathlib.Path({str(tmp_path / "peer.log")!r}), pathlib.Path({str(script)!r})
    measured_by_worker(sys.executable, script, {ASKED!r}, log=log, deadline_sec=600)
"""
    run = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    try:
        wait_until((tmp_path / "server.pid").exists, "the server of the peer runs")
        run.send_signal(number)
        assert run.wait(60) != 0
        wait_for_end(tmp_path / "server.pid")
        wait_for_end(tmp_path / "worker.pid")
    finally:
        run.kill()
        run.wait()


def test_scripts_import_nothing_of_this_project() -> None:
    scripts = [path for path in WORKER.parent.glob("*.py") if path.name not in ("pins.py", "fbgemm_tables.py")]
    assert {f"{peer.worker}.py" for peer in PEERS if peer.worker} <= {path.name for path in scripts}
    wrong = [
        f"{path.name}:{number}: {line}"
        for path in sorted(scripts)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if "import" in line and "worker import Tools" not in line and ("sparserow" in line or "from ." in line)
    ]
    assert not wrong, "\n".join(wrong)


def test_an_environment_needs_a_python_that_its_packages_exist_for() -> None:
    known = interpreters([sys.executable])
    assert [each.version for each in known] == [HERE, HERE]
    for pins in ENVIRONMENTS:
        assert all(name.count("==") == 1 for install in pins.installs for name in install if name[0] != "-")
    with pytest.raises(PeerError, match=rf"needs Python 3\.1 or 3\.2, and there is {HERE}; give --python PATH"):
        fitting(PinnedEnvironment("old", ("3.1", "3.2"), ()), known)
    with pytest.raises(InvalidArgument, match=r"--python /nowhere/python: is no program"):
        interpreters(["/nowhere/python"])
    with pytest.raises(InvalidArgument, match=r"--python true: does not name its version"):
        interpreters(["true"])
    with pytest.raises(InvalidArgument, match=r"--only: 'nothing' is no peer; allowed: torch_rpc_memory, "):
        chosen("redis,nothing")
    with pytest.raises(InvalidArgument, match=r"--environments /dev/null/peers: the folder cannot be created: "):
        next(run_peers(TINY, [], Path("/dev/null/peers"), known))


def test_environments_are_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "sparserow" / "peers"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_folder() == Path.home() / ".cache" / "sparserow" / "peers"


def test_an_environment_is_made_whole_or_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    known = interpreters([])
    place = tmp_path / f"some-{HERE}"
    place.mkdir()
    (place / "left.txt").write_text("of a run that was ended")
    with pytest.raises(PeerError) as failed:
        python_of(PinnedEnvironment("some", (HERE,), (("no-such-package==1.0",),)), tmp_path, known)
    assert "Could not find a version that satisfies the requirement no-such-package==1.0" in failed.value.reason
    assert failed.value.log is not None
    assert "no-such-package==1.0" in failed.value.log.read_text()
    assert not (place / "left.txt").exists()
    assert not (place / "complete.json").exists()
    (place / "left.txt").write_text("of a run whose pip failed")
    whole = PinnedEnvironment("some", (HERE,), ())
    python = python_of(whole, tmp_path, known)
    assert not (place / "left.txt").exists(), "a half-made environment is made anew"
    prefix = subprocess.run([python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True, check=True)
    assert prefix.stdout.strip() == str(place)
    (place / "kept.txt").write_text("of a whole environment")
    assert python_of(whole, tmp_path, known) == python
    assert (place / "kept.txt").exists()
    told = capfd.readouterr().err
    with (tmp_path / f"some-{HERE}.lock").open("a") as lock, ThreadPoolExecutor(1) as other_run:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waits = other_run.submit(python_of, whole, tmp_path, known)
        wait_until(lambda: "another run makes this environment" in capfd.readouterr().err, "the other run waits")
        assert not waits.done()
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert waits.result(60) == python
    assert told.count("some: making an environment of Python") == 4, "the begin and the end of two"
    assert "some: installing no-such-package==1.0 ..." in told


def call(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "peers", *map(str, words)])
    return int(ended.value.code or 0)


def test_peers_of_torch_are_measured_beside_this_project_and_others_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    impossible = [replace(peer, goals=dict.fromkeys(peer.works, 1e9)) for peer in PEERS]
    monkeypatch.setattr(peers_run, "PEERS", tuple(impossible))
    monkeypatch.setattr(peer_contests, "FULL", replace(TINY, is_judged=True))
    monkeypatch.setattr(peers_run, "CONTESTS", [each for each in CONTESTS if each.title in ("network", "training")])
    monkeypatch.setenv("PATH", str(tmp_path))
    path, page = tmp_path / "figures.json", tmp_path / "peers.md"
    only = ["--only", "torch_rpc_tcp,torch_bags,redis", "--environments", tmp_path / "peers"]
    assert call(*only, "--json", path, "--write", page) == 0, "a figure that misses its goal fails nothing"
    out = capsys.readouterr().out
    assert "skipped: redis: redis-server is not installed" in out
    assert "missed: network: pull 50 x 8: of torch.distributed.rpc, TCP: " in out
    figures = {row["metric"]: row for row in json.loads(path.read_text())}
    for work, title in (
        ("network: push with Adagrad", "torch.distributed.rpc, TCP"),
        ("training: step", "torch EmbeddingBag"),
    ):
        name = f"{work} 50 x 8"
        ours, theirs = figures[f"{name}: of {title}"], figures[f"{name}: {title}"]
        assert ours["ratio"] == pytest.approx(ours["value"] / theirs["value"])
    assert figures["network: pull 50 x 8: raw TCP, same bytes"]["value"] > 0
    text = page.read_text()
    assert "| not measured (all) | Redis | a hash of strings |" in text
    assert "redis-server is not installed" in text
    assert "| torch EmbeddingBag | torch 2" in text
    assert [line for line in text.splitlines() if len(line) > 160 and line[0] != "|"] == []


def test_a_peer_that_fails_is_told_and_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = replace(next(peer for peer in PEERS if peer.name == "fbgemm"), environment=None, worker="no_such_script")
    bags = replace(
        next(peer for peer in PEERS if peer.name == "torch_bags"), goals={"read": 1e9}, works=("read", "update")
    )
    monkeypatch.setattr(peers_run, "PEERS", (gone, bags))
    monkeypatch.setattr(peer_contests, "QUICK", TINY)
    folder = tmp_path / "peers"
    assert call("--quick", "--strict", "--environments", folder, "--json", tmp_path / "figures.json") == 1
    out = capsys.readouterr().out
    assert "failed: fbgemm, one process, one thread: ended with status 1: FileNotFoundError" in out
    assert f"its output is in {folder / 'fbgemm.log'}" in " ".join(out.split())
    assert "missed" not in out, "small sizes are not judged"
    metrics = [row["metric"] for row in json.loads((tmp_path / "figures.json").read_text())]
    assert "one process, one thread: pull 50 x 8: torch EmbeddingBag" in metrics
    assert "one process, one thread: Adagrad 50 x 8: of torch EmbeddingBag" in metrics
    assert not any("fbgemm" in metric for metric in metrics)


def report_of(seconds: float) -> PeersReport:
    """A report of Redis's lookups, which take so long, beside lookups of 1 ms."""
    contest = CONTESTS[-1]
    redis = next(peer for peer in PEERS if peer.name == "redis")
    report = PeersReport(peer_contests.FULL, machine="a machine", load=3.0)
    report.results.append(PeerResult(redis, contest, "lookup", 64, [seconds] * 9, [1e-3] * 9))
    report.ours[contest.title, "lookup", 64] += [1e-3] * 9
    report.versions["redis"] = {"redis-server": "7.0"}
    report.skipped["paddle"] = PeerError("pip has no such package", Path("/somewhere/paddle.log"))
    report.failed["tfra", "training"] = PeerError("ended with status 1: a | b", Path("/somewhere/tfra.log"))
    return report


def test_a_page_has_ratios_what_missed_and_what_is_not_comparable() -> None:
    page = peers_report.page_of(report_of(2e-3))
    assert "**The machine was not quiet**: its load was 3.0" in page
    assert (
        "| | Redis | a hash of strings | 0.50 |  | 2.00 | p50 2.00 ms, p99 2.00 ms. One MGET with its encoding;" in page
    )
    assert "| Redis | redis-server 7.0 | Debian's package redis-server |" in page
    assert "| not measured (training) | TFRA (TensorFlow Recommenders Addons) | a cuckoo hash |" in page
    assert "| not measured (all) | Paddle parameter server, brpc | a hash |  |  | | pip has no such package |" in page
    assert "ended with status 1: a \\| b |" in page
    assert "/somewhere" not in page, "a page names no path of the machine"
    slower = report_of(5e-4)
    assert "| 0.50 missed |" in peers_report.page_of(slower)
    (judged,) = [figure for figure in peers_report.peer_figures(slower) if figure.passes is not None]
    assert (judged.metric, judged.passes) == ("serving: lookup 1000 x 64: of Redis", False)
    slower.size = replace(peer_contests.QUICK, served_keys=1000)
    assert "| 0.50 |" in peers_report.page_of(slower), "small sizes are not judged"
    assert [figure.passes for figure in peers_report.peer_figures(slower) if figure.passes is not None] == []
