"""Workers that come and go: each sample of an epoch is trained on once, whoever is there."""

from __future__ import annotations

import json
import re
import signal
import socket
from pathlib import Path

import pytest

from elastic_job import SAMPLES, updates, write_job
from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.control import ControlClient
from sparserow_process import Launcher, wait_until


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path)


def jobs_of(address: str):
    with ControlClient(address) as control:
        return [job for job in control.status().jobs if job.name == "elastic"]


def members_of(address: str) -> dict[int, int]:
    """Epoch by rank."""
    return {member.rank: member.epoch for job in jobs_of(address) for member in job.members if member.lease_left_sec}


def test_one_is_killed_and_one_joins(launcher: Launcher, job: Path, tmp_path: Path) -> None:
    up = launcher.start("up", "--shards=1", "--port=0", "--worker-lease=300s")
    address = up.wait_for(r"ready at (\S+:\d+)")[1]
    result = tmp_path / "result.json"
    arguments = ("train", str(job), "--set", f"cluster.address={address}", "--json", str(result))
    run = launcher.start(*arguments)
    wait_until(lambda: any(each.highest_step >= 10 for each in jobs_of(address)), "the first steps", 600)
    first, victim = sorted(launcher.by_role()["worker"], key=lambda process: process.pid)
    first.suspend()  # which is as many steps behind as is allowed: nobody ends before all are there
    victim.kill()
    launcher.environment.update(TORCHELASTIC_RUN_ID="another", RANK="2", WORLD_SIZE="3", LOCAL_WORLD_SIZE="3")
    joined = launcher.start(*arguments)
    wait_until(lambda: members_of(address) == {0: 1, 1: 2, 2: 1}, "another one in its place, and one that joins", 600)
    first.resume()
    assert run.popen.wait(600) == 0, run.err
    assert joined.popen.wait(600) == 0, joined.err
    where = f"worker 1 on {socket.gethostname()} (process {victim.pid})"
    assert f"{where}: worker 1 ended by signal 9" in run.err
    assert "a new worker takes its place (9 restarts left)" in run.err
    figures = json.loads(result.read_text())
    assert 0.8 < figures["test_auc"] < 0.95
    assert updates(launcher, address, tmp_path / "rows") == dict.fromkeys(range(SAMPLES), 2)
    assert [epoch["samples"] for epoch in figures["history"]] == [SAMPLES, SAMPLES], "of all workers"
    up.signal(signal.SIGTERM)
    assert up.end() == 0


@pytest.mark.full
def test_each_sample_counts_once_also_when_all_goes_back_to_a_save(
    launcher: Launcher, job: Path, tmp_path: Path
) -> None:
    up = launcher.start("up", "--shards=2", "--port=0", "--worker-lease=3s")
    address = up.wait_for(r"ready at (\S+:\d+)")[1]
    url, result = tmp_path / "saves", tmp_path / "result.json"
    sets = [f"cluster.address={address}", "train.epochs=1", "train.staleness=null"]
    sets += [f"train.elastic={{lease_rows: 200, url: {url}, save_every: 0.3s}}"]
    arguments = ["train", str(job), "--resume=auto", "--json", str(result), *(f"--set={each}" for each in sets)]
    run = launcher.start(*arguments)
    wait_until(lambda: any(each.highest_step >= 20 for each in jobs_of(address)), "the first steps", 600)
    known = files.list_names(Folder(str(url)))[-1:]
    wait_until(lambda: files.list_names(Folder(str(url)))[-1:] > known, "a save of them")
    run.popen.kill()  # and its workers with it
    run.end()
    wait_until(lambda: not launcher.by_role()["worker"], "the workers to end")
    again = launcher.start(*arguments, "--workers=3")
    assert again.popen.wait(600) == 0, again.err
    figures = json.loads(result.read_text())
    assert figures["workers"] == 3
    assert [epoch["samples"] for epoch in figures["history"]] == [SAMPLES], "with those before the save"
    assert updates(launcher, address, tmp_path / "rows") == dict.fromkeys(range(SAMPLES), 1)
    up.signal(signal.SIGTERM)
    assert up.end() == 0


def test_a_run_starts_from_another_ones_saves_over_data_of_its_own(
    launcher: Launcher, job: Path, tmp_path: Path
) -> None:
    """It has the name and the files of the run before, which has trained on all of them."""

    def trained(name: str, *more: str) -> dict[int, int]:
        up = launcher.start("up", "--shards=2", "--port=0", "--worker-lease=30s")
        address = up.wait_for(r"ready at (\S+:\d+)")[1]
        sets = (f"cluster.address={address}", "train.epochs=1", "train.elastic.save_every=0.3s",
                f"train.elastic.url={tmp_path / name}")  # fmt: skip
        run = launcher.start("train", str(job), *(f"--set={each}" for each in sets), *more)
        assert run.popen.wait(600) == 0, run.err
        assert ("starts from " in run.err) == bool(more)
        assert run.err.count("starts from ") <= 1
        found = updates(launcher, address, tmp_path / f"rows of {name}")
        up.signal(signal.SIGTERM)
        assert up.end() == 0
        return found

    assert trained("first") == dict.fromkeys(range(SAMPLES), 1)
    second = trained("second", f"--from={tmp_path / 'first'}")
    assert set(second) == set(range(SAMPLES))
    assert set(second.values()) <= {1, 2}, "the last save is of a moment before the end"
    assert sum(count == 2 for count in second.values()) > SAMPLES / 4
    first = f"--from={tmp_path / 'first'}"
    for more, wanted in (
        ((f"--from={tmp_path / 'empty'}",), r"train\.elastic\.start_from: .*empty has no checkpoint"),
        ((first, "--accept=tower"), r"train\.elastic: accept: tower and TABLE\.dim are not possible"),
        ((first, "--set=model.args.rows={'*': 5000}"), r"rows for the feature \w+, and this job 5000"),
        ((first, "--set=model.args.hidden=[16]"), r"has another tower: \d+ tensors there and \d+ here"),
        ((first, "--set=features={value: {kind: id}}"), r"\[id\] are no longer there.*with train\.dense ps the tower"),
    ):
        run = launcher.start("train", str(job), "--set=train.epochs=1", *more)
        assert run.popen.wait(600) == 1, wanted
        assert re.search(wanted, run.err), run.err
    url = f"--set=train.elastic.url={tmp_path / 'first'}"
    for change, wanted in (
        ("model.args.hidden=[16]", r"--resume: .*has another tower"),
        ("features={value: {kind: id}, id: {kind: id}}", r"--resume: .*in the order"),
    ):
        run = launcher.start("train", str(job), "--set=train.epochs=1", url, f"--set={change}", "--resume=auto")
        assert run.popen.wait(600) == 1, wanted
        assert re.search(wanted, run.err), run.err
