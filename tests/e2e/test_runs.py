"""Checkpoints of one run are not removed by another one that was not told to."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import sparserow as sr
from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import FailedPrecondition, ResourceExhausted
from sparserow.proto.names import is_file_table
from sparserow.worker.data import write_click_log
from sparserow.worker.training.run_identity import RunIdentity
from sparserow_process import Launcher, Process, wait_until

JOBS = Path(__file__).resolve().parents[2] / "deploy" / "jobs"
WAIT_SEC = 300


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return write_click_log(tmp_path_factory.mktemp("log"), rows=1280, test_rows=300, seed=3)


def start(launcher: Launcher, log, url: Path, *options: str, sets: tuple[str, ...] = ()) -> Process:
    settings = [
        f"data.train={log.train}",
        f"data.test={log.test}",
        "model.args.rows={'*': 1000}",
        "model.min_rows=1",
        "train.batch_size=64",
        "train.threads=1",
        "cluster.slot_count=64",
        f"train.checkpoint={{url: '{url}', every_steps: 5, keep: 2}}",
        *sets,
    ]
    assigned = [part for setting in settings for part in ("--set", setting)]
    return launcher.start("train", str(JOBS / "demo.yaml"), *assigned, *options)


def ran(process: Process) -> None:
    assert process.popen.wait(WAIT_SEC) == 0, process.err


def checkpoints(url: Path) -> dict[str, str]:
    """The run of each checkpoint."""
    folder = Folder(str(url))
    return {name: files.read_manifest(folder, name).config["run_id"] for name in files.list_names(folder)}


def test_a_second_run_is_refused_the_folder_of_the_first(launcher: Launcher, log, tmp_path: Path) -> None:
    url = tmp_path / "ckpt"
    ran(start(launcher, log, url))
    first = checkpoints(url)
    assert len(first) == 2
    assert len(set(first.values())) == 1
    sets = ("train.workers=2", "train.staleness=2", "train.dense=ps")
    line = start(launcher, log, url, sets=sets).error_line()
    assert f"train.checkpoint.url: {url} has 2 checkpoints of another run, the newest {max(first)}; " in line
    assert "--resume auto" in line
    assert "--overwrite-checkpoints" in line
    assert checkpoints(url) == first
    ran(start(launcher, log, url, "--resume", "auto", sets=("train.epochs=2",)))
    then = checkpoints(url)
    assert then[max(then)] not in first.values()
    assert then[max(first)] in first.values(), "the one that it began from stays"
    ran(start(launcher, log, url, "--overwrite-checkpoints"))
    last = checkpoints(url)
    assert len(last) == 2
    assert not set(last.values()) & {*first.values(), *then.values()}


def test_workers_that_are_started_again_are_of_their_run(launcher: Launcher, log, tmp_path: Path) -> None:
    """A worker of an elastic job is killed; the one in its place finds saves of its own run."""
    url = tmp_path / "rows"
    sets = (
        "train.workers=2",
        "train.staleness=2",
        "train.dense=ps",
        "train.epochs=20",
        f"train.elastic={{url: '{url}', save_every: 1, lease_rows: 64, max_restarts: 3}}",
    )
    result = tmp_path / "result.json"
    run = start(launcher, log, tmp_path / "none", "--json", str(result), sets=(*sets, "train.checkpoint=null"))
    wait_until(lambda: len(files.list_names(Folder(str(url)))) >= 1, "saves of the rows", WAIT_SEC)
    wait_until(lambda: "epoch 2/20" in run.err, "some epochs", WAIT_SEC)
    workers = [each for each in launcher.living() if any("worker_process" in word for word in each.cmdline())]
    min(workers, key=lambda worker: worker.pid).kill()  # rank 0, which tests and tells
    ran(run)
    told = re.findall(r"^epoch (\d+)/20: ", run.err, re.MULTILINE)
    assert len(set(told)) >= len(told) - 1, "only the epoch in which it came may be told again"
    history = json.loads(result.read_text())["history"]
    assert [epoch["epoch"] for epoch in history] == sorted({epoch["epoch"] for epoch in history})
    assert len(set(checkpoints(url).values())) == 1
    line = start(launcher, log, tmp_path / "none", sets=(*sets, "train.checkpoint=null")).error_line()
    assert f"train.elastic.url: {url} has" in line


def test_the_result_counts_the_rows_of_the_job(launcher: Launcher, log, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    with sr.local_cluster(shards=1, checkpoint_roots=(str(tmp_path),)) as cluster:
        with sr.connect(cluster.address, "another") as session:
            table = session.create_table("rows", dim=2, optimizer=sr.optim.SGD())
            table.assign(list(range(5000)), np.zeros((5000, 2), np.float32))
        url = tmp_path / "ckpt"
        run = start(
            launcher,
            log,
            url,
            "--json",
            str(result),
            "--resume",
            "auto",
            sets=("name=own", f"cluster={{address: '{cluster.address}'}}"),
        )
        ran(run)
        assert f"no checkpoint is in {url} to go on from" in run.err
        with ControlClient(cluster.address) as control:
            status = control.status()
        tables = [each for each in status.shards[0].tables if each.name.startswith("own/")]
        own = sum(each.rows for each in tables if not is_file_table(each.name.removeprefix("own/")))
        assert json.loads(result.read_text())["rows"] == own
        assert 0 < own < 5000 + own


def test_torchrun_names_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert RunIdentity.of_torchrun("nightly") == RunIdentity.of_torchrun("nightly")
    assert RunIdentity.of_torchrun("none") != RunIdentity.of_torchrun("none"), "of two starts of torchrun"
    assert not RunIdentity.of_torchrun("none").goes_on
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert RunIdentity.of_torchrun("none").goes_on
    assert not RunIdentity.of_torchrun("nightly").goes_on, "its name says which checkpoints are its own"


def test_a_checkpoint_without_a_run_is_of_another(tmp_path: Path) -> None:
    from sparserow.proto.config.job import JobConfig
    from sparserow.proto.options.document import load_config

    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address) as session:
        session.create_table("rows", dim=2, optimizer=sr.optim.SGD())
        session.save(str(tmp_path))
    job = load_config(JobConfig, JOBS / "demo.yaml", [f"train.checkpoint={{url: '{tmp_path}', every_steps: 5}}"])
    with pytest.raises(FailedPrecondition, match="1 checkpoint of another run, the newest save-000001"):
        RunIdentity.new().check_folders(job)
    RunIdentity.new(resume="auto").check_folders(job)
    assert files.list_names(Folder(str(tmp_path))) == ["save-000001"]
    RunIdentity.new(overwrites=True).check_folders(job)
    assert files.list_names(Folder(str(tmp_path))) == []


def test_saves_of_rows_are_of_the_run_that_asked_last(tmp_path: Path) -> None:
    """A job that runs again while the series of its first run goes on: the saves carry the id of the run of now."""
    url = tmp_path / "rows"
    with sr.local_cluster(shards=1, checkpoint_roots=(str(tmp_path),)) as cluster:
        for name in ("first", "second"):
            with sr.connect(cluster.address, staleness=None) as session:
                session.create_table("rows", dim=2, optimizer=sr.optim.SGD())
                session.keep_rows(str(url), every_sec=0.2, config={"run_id": name})
                wait_until(lambda name=name: name in checkpoints(url).values(), f"a save of the {name} run", 10)


def test_a_job_keeps_rows_in_a_bounded_number_of_folders(tmp_path: Path) -> None:
    with (
        sr.local_cluster(shards=1, checkpoint_roots=(str(tmp_path),)) as cluster,
        sr.connect(cluster.address, staleness=None) as session,
    ):
        for number in range(16):
            session.keep_rows(str(tmp_path / str(number)), every_sec=3600)
        session.keep_rows(str(tmp_path / "3"), every_sec=3600)
        with pytest.raises(
            ResourceExhausted, match="the job's rows are saved in 16 folders already; allowed: at most 16"
        ):
            session.keep_rows(str(tmp_path / "16"), every_sec=3600)
