"""Why workers of a job ended, read in one place: one raises, the other is killed without a word."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import sparserow as sr
from sparserow.deploy.cli import main
from sparserow.proto.control import ControlClient
from sparserow_process import DEADLINE_SEC, Launcher, wait_until

JOIN_AND_WAIT = """
import sys
from sparserow.proto.control import ControlClient
with ControlClient(sys.argv[1]) as control:
    control.register_worker(namespace="ads", job="ctr", rank=0, world_size=2, staleness=None, deadline_sec=600.0)
    sys.stdin.read()
"""


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert not ended.value.code


@pytest.mark.started
def test_one_command_shows_why_each_worker_of_a_job_ended(
    launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with sr.local_cluster(shards=1, worker_lease=3.0) as cluster:
        silent = subprocess.Popen([sys.executable, "-c", JOIN_AND_WAIT, cluster.address], stdin=subprocess.PIPE)
        try:
            failing = launcher.start_script("failing_worker.py", cluster.address, "1", "2")
            assert failing.end() == 1
        finally:
            silent.kill()
            silent.wait(DEADLINE_SEC)
        assert "ValueError: could not convert string to float" in failing.err, "its own error is what it ends with"
        with ControlClient(cluster.address) as control:
            wait_until(lambda: len(control.status().faults) == 2, "the lease to end")
            assert not any(fault.traceback for fault in control.status().faults)
        shown = launcher.start("status", "--faults", f"--coordinator={cluster.address}")
        assert shown.end() == 0, shown.err
        figures, lines = tmp_path / "faults.json", tmp_path / "lines.json"
        run("status", "--faults", f"--coordinator={cluster.address}", f"--json={figures}")
        capsys.readouterr()
        run("status", "--over=0s", f"--coordinator={cluster.address}", f"--json={lines}")
        screen = capsys.readouterr().out
    for words in ("rank 1 on", "in train_on", "return float(sample)", "rank 0 on", "its lease has ended", "s3://***@b"):
        assert words in shown.out
    assert "password" not in shown.out
    faults = json.loads(figures.read_text())["faults"]
    by_rank = {fault["rank"]: fault for fault in faults}
    assert by_rank[0]["pid"] == silent.pid
    assert by_rank[1]["pid"] == failing.popen.pid
    assert {(fault["job"], fault["host"], fault["incident"]) for fault in faults} == {
        ("ads/ctr", socket.gethostname(), 1)
    }
    assert "Traceback (most recent call last)" in by_rank[1]["traceback"]
    assert by_rank[0]["traceback"] == ""
    assert json.loads(lines.read_text())["faults"] == [{**fault, "traceback": ""} for fault in faults]
    for words in ("ValueError: could not convert", "its lease has ended", socket.gethostname()):
        assert words in screen
