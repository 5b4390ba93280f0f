"""``sparserow train --resume auto``: whatever is killed, the end is that of the run left alone, bit for bit."""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import signal
from pathlib import Path

import numpy as np
import pytest

import sparserow as sr
from checkpoint_rows import rows_of_checkpoint
from long_form import FULL
from sparserow.cpp_ext.torch_arrays import tensor_of
from sparserow.deploy.train.run_report import read_run
from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.checkpoint.state_tree import decode_tree
from sparserow.worker.data import write_click_log
from sparserow_process import wait_until

JOBS = Path(__file__).resolve().parents[2] / "deploy" / "jobs"
WAIT_SEC = 900 if FULL else 600  # on a machine that has much else to do
STEPS = 30


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return write_click_log(tmp_path_factory.mktemp("log"), rows=2 * STEPS * 64, test_rows=1500, seed=3)


def curves_beside(result: Path) -> Path:
    """Returns the file of a run's curves, whose windows of three steps end between its checkpoints."""
    return result.with_suffix(".curves")


def arguments(log, url, result, *sets: str) -> list[str]:
    settings = [
        f"data.train={log.train}",
        f"data.test={log.test}",
        "model.args.rows={'*': 3000}",
        "model.min_rows=1",
        "model.args.dropout=0.2",
        "train.batch_size=64",
        "train.workers=2",
        "train.threads=1",
        "train.prefetch=1",
        "train.schedule={kind: step, every_steps: 7, factor: 0.9}",
        "cluster.slot_count=256",
        "cluster.worker_lease=20s",
        f"train.checkpoint={{url: '{url}', every_steps: 5, keep: 2}}",
        f"metrics={{progressive: {{window: 384}}, file: {curves_beside(result)}}}",
        *sets,
    ]
    assigned = [part for setting in settings for part in ("--set", setting)]
    return ["train", str(JOBS / "demo.yaml"), *assigned, "--json", str(result), "--resume", "auto"]


def dense_of(url) -> dict[str, list]:
    manifest = files.read_manifest(Folder(str(url)))
    worker = manifest.workers[0]
    tree = decode_tree((Folder(str(url)) / manifest.name).read(worker.file), worker.file, tensor_of)
    handles = "._extra_state"  # of tables, with the cluster's id
    return {name: value.flatten().tolist() for name, value in tree["model"].items() if not name.endswith(handles)}


def outcome(url, result) -> dict:
    figures = json.loads(result.read_text())
    rows = rows_of_checkpoint(url)
    return {
        "auc": figures["test_auc"],
        "loss": figures["history"][0]["train_loss"],
        "samples": figures["history"][0]["samples"],
        "dense": dense_of(url),
        "curves": {
            chart: {name: (each.samples, each.values) for name, each in curves.items() if name != "recent samples"}
            for chart, curves in read_run(curves_beside(result)).charts.items()
            if chart != "samples per second"
        },
        "rows": {table: {key: row[1:] for key, row in by_key.items()} for table, by_key in rows.items()},
    }


@pytest.fixture(scope="module")
def undisturbed(log, tmp_path_factory):
    from sparserow_process import Launcher

    folder = tmp_path_factory.mktemp("undisturbed")
    launcher = Launcher(folder)
    try:
        run = launcher.start(*arguments(log, folder / "ckpt", folder / "result.json"))
        assert run.popen.wait(WAIT_SEC) == 0, run.err
    finally:
        launcher.kill_all()
    return outcome(folder / "ckpt", folder / "result.json")


@pytest.mark.parametrize("number", range(10 if FULL else 1))
def test_killed_at_random_the_end_is_the_same(launcher, log, tmp_path, undisturbed, number):
    seed = int(os.environ.get("SPARSEROW_TEST_SEED", secrets.randbits(32))) + number
    print(f"seed {seed}")
    draw = random.Random(seed)
    url, result = tmp_path / "ckpt", tmp_path / "result.json"
    run = launcher.start(*arguments(log, url, result))
    kinds = draw.sample(["worker", "shard", "cluster"], k=3 if FULL else 1)
    for index, kind in enumerate(kinds):
        wanted = draw.randrange(1, 3) + index * 2  # checkpoints that are there before the next death

        def is_far_enough(wanted: int = wanted, kind: str = kind) -> bool:
            names = files.list_names(Folder(str(url)))
            number = files.number_of(names[-1]) if names else 0
            return run.popen.poll() is not None or ((number or 0) >= wanted and bool(launcher.by_role()[kind]))

        wait_until(is_far_enough, f"{wanted} checkpoints, then the end of a {kind}", WAIT_SEC)
        alive = launcher.by_role()[kind]
        assert alive, run.err
        draw.choice(alive).send_signal(signal.SIGKILL)
        wait_until(
            lambda count=index + 1: run.popen.poll() is not None or run.err.count("restarts left") >= count,
            f"the restart after the end of a {kind}",
            WAIT_SEC,
        )
    assert run.popen.wait(WAIT_SEC) == 0, run.err
    # More than that where a worker had no CPU for so long that its lease ended.
    assert run.err.count("restarts left") >= len(kinds), run.err
    result_now = outcome(url, result)
    for what, value in undisturbed.items():
        assert result_now[what] == value, what
    wait_until(lambda: not launcher.living(), "no process is left")


@pytest.mark.full("test_device_tables.py kills a rank of a script")
def test_a_run_with_tables_on_devices_ends_the_same_after_a_worker_is_killed(launcher, log, tmp_path, undisturbed):
    url, result = tmp_path / "ckpt", tmp_path / "result.json"
    run = launcher.start(*arguments(log, url, result, "tables={'*.C[1-9]': {placement: device}}"))
    wait_until(lambda: len(files.list_names(Folder(str(url)))) >= 2, "two checkpoints", WAIT_SEC)
    launcher.by_role()["worker"][1].send_signal(signal.SIGKILL)
    assert run.popen.wait(WAIT_SEC) == 0, run.err
    assert run.err.count("restarts left") >= 1, run.err
    result_now = outcome(url, result)
    assert 0 < len(result_now["rows"]) < len(undisturbed["rows"])  # those on servers, which are in files of rows
    for table, rows in result_now["rows"].items():
        assert rows == undisturbed["rows"][table], table
    for what in ("auc", "loss", "samples", "dense"):
        assert result_now[what] == undisturbed[what], what


def test_the_whole_run_is_killed_and_started_again(launcher, log, tmp_path, undisturbed):
    url, result = tmp_path / "ckpt", tmp_path / "result.json"
    run = launcher.start(*arguments(log, url, result))
    wait_until(lambda: len(files.list_names(Folder(str(url)))) >= 2, "two checkpoints")
    launcher.kill_all()
    assert run.popen.returncode is not None
    # Other shards than before; and a run that is over already ends at once.
    for _ in range(2 if FULL else 1):
        again = launcher.start(*arguments(log, url, result, "cluster.shards=3"))
        assert again.popen.wait(WAIT_SEC) == 0, again.err
        assert "restarts left" not in again.err
        result_now = outcome(url, result)
        assert {**result_now, "samples": None} == {**undisturbed, "samples": None}


def test_resume_needs_checkpoints(launcher, log, tmp_path):
    line = launcher.start("train", str(JOBS / "demo.yaml"), "--resume", "auto").error_line()
    assert "--resume auto: the job has no section train.checkpoint" in line
    line = launcher.start(*arguments(log, tmp_path, tmp_path / "r")[:-1], "newest").error_line()
    assert "--resume: 'newest' is not allowed; allowed: auto, never, or a name such as save-000003" in line
    line = launcher.start(*arguments(log, tmp_path, tmp_path / "r")[:-1], "save-000009").error_line()
    assert "there is no checkpoint 'save-000009'" in line


@pytest.mark.full
def test_an_asynchronous_job_with_its_tower_on_the_servers_goes_on_from_a_checkpoint(launcher, log, tmp_path):
    url, result = tmp_path / "ckpt", tmp_path / "result.json"
    sets = ("train.staleness=null", "train.dense=ps", "train.prefetch=0", "train.schedule={kind: constant}")
    run = launcher.start(*arguments(log, url, result, *sets))
    wait_until(lambda: len(files.list_names(Folder(str(url)))) >= 1, "a checkpoint")
    # A shard alone would come back by itself: tests/faults/test_shard_recovery.py.
    launcher.by_role()["cluster"][0].send_signal(signal.SIGKILL)
    assert run.popen.wait(WAIT_SEC) == 0, run.err
    assert run.err.count("restarts left") == 1, run.err
    assert json.loads(result.read_text())["test_auc"] > 0.5


def test_another_position_in_the_data_is_refused_before_a_row_is_touched(launcher, log, tmp_path):
    result, key = tmp_path / "result.json", np.array([1], np.uint64)
    with sr.local_cluster(shards=1) as cluster:
        settings = [
            f"data.train={log.train}",
            f"data.test={log.test}",
            "model.args.rows={'*': 3000}",
            "model.min_rows=1",
            "train.threads=1",
        ]
        settings += [f"train.checkpoint={{url: '{tmp_path}/ckpt', every_steps: 9999}}", "train.workers=2"]
        settings += ["cluster={}", f"cluster.address={cluster.address}"]
        words = ["train", str(JOBS / "demo.yaml"), "--json", str(result)]
        words += [part for setting in settings for part in ("--set", setting)]
        run = launcher.start(*words)
        assert run.popen.wait(WAIT_SEC) == 0, run.err
        with sr.connect(cluster.address, namespace="demo", job="onlooker") as session:
            name = next(table.name for table in session.core.catalog.list_tables("demo"))
            table = session.table(name)
            later = np.full_like(table.pull(key), 5.0)
            table.assign(key, later)
            refused = launcher.start(*words, "--set", "data.shuffle_rows=77", "--resume", "auto")
            assert refused.end() == 1
            assert "reader state: shuffle_rows was 131072; this reader has 77" in refused.complaints[-1]
            np.testing.assert_array_equal(table.pull(key), later)


def test_another_number_of_workers_goes_on_and_each_sample_comes_once(launcher, log, tmp_path):
    url, result = tmp_path / "ckpt", tmp_path / "result.json"
    run = launcher.start(*arguments(log, url, result))
    wait_until(lambda: len(files.list_names(Folder(str(url)))) >= 2, "two checkpoints")
    launcher.kill_all()
    assert run.popen.returncode is not None
    again = launcher.start(*arguments(log, url, result, "train.workers=3"))
    assert again.popen.wait(WAIT_SEC) == 0, again.err
    assert "in epoch 1" in again.err  # and not at its end
    figures = json.loads(result.read_text())
    assert (figures["workers"], figures["history"][0]["samples"]) == (3, 2 * STEPS * 64)
    ends = read_run(curves_beside(result)).charts["auc"]["progressive"].samples
    assert (sorted(ends), ends[-1]) == (ends, 2 * STEPS * 64)
    assert figures["test_auc"] > 0.5


def test_a_run_goes_on_with_the_optimizers_of_its_job_file(launcher, log, tmp_path):
    """As a user does who lowers a rate after a loss that grew; rates of 0 leave all weights as they were saved."""
    url, result = tmp_path / "ckpt", tmp_path / "result.json"
    words = arguments(log, url, result, "train.workers=1", "train.prefetch=0", "train.epochs=1")
    assert launcher.start(*words).end() == 0
    dense, rows = dense_of(url), rows_of_checkpoint(url)
    changed = ["--set", "train.epochs=2", "--set", "train.dense_optimizer={kind: adamw, lr: 0, weight_decay: 0.5}"]
    other = launcher.start(*words, *changed, "--set", "train.dense_optimizer={kind: sgd}")
    assert other.end() == 1
    assert "has the state of another kind of optimizer, with the option" in other.complaints[-1]
    other = launcher.start(*words, "--set", "train.epochs=2", "--set", "train.row_optimizer={kind: adam, lr: 0.1}")
    wanted = (
        r"optimizer Adam, the checkpoint has Adagrad; set it in the job file \(train.row_optimizer or tables\) as it"
    )
    assert re.search(wanted, other.error_line())
    other = launcher.start(*words, "--set", "train.epochs=2", "--set", "tables={'*.C1': {dtype: bfloat16}}")
    assert re.search(
        r"dtype 'bfloat16', the checkpoint has 'float32'; set it in the job file \(model or tables\) as it",
        other.error_line(),
    )
    run = launcher.start(*words, *changed, "--set", "train.row_optimizer={kind: adagrad, lr: 0}")
    assert run.end() == 0, run.err
    assert dense_of(url) == dense
    after = rows_of_checkpoint(url)
    for table, by_key in rows.items():
        for key, row in by_key.items():
            assert after[table][key][2] == row[2]


def by_name(rows: str, numbers: str = "[I1, I2]") -> str:
    sizes = "dim: 4, bottom: [4], top: [4]"
    return f"model={{class: DLRM, min_rows: 1, args: {{numbers: {numbers}, rows: {rows}, {sizes}}}}}"


def test_another_order_of_inputs_is_refused_before_a_row_is_touched(launcher, log, tmp_path):
    """The shapes are the same; yaml.safe_dump sorts the keys of a job file."""
    result, key = tmp_path / "result.json", np.array([1], np.uint64)
    with sr.local_cluster(shards=1) as cluster:
        settings = [f"data.train={log.train}", f"data.test={log.test}", "train.threads=1", "train.epochs=1"]
        settings += [f"train.checkpoint={{url: '{tmp_path}/ckpt', every_steps: 9999}}", "cluster={}"]
        settings += [
            f"cluster.address={cluster.address}",
            "model={class: DLRM, args: {rows: {'*': 1000000}}}",
        ]
        features = ("I1: {kind: dense}", "I2: {kind: dense}", "C1: {kind: id}", "C2: {kind: id}")
        settings += [f"features={{{', '.join(features)}}}"]
        words = ["train", str(JOBS / "demo.yaml"), "--json", str(result)]
        words += [part for setting in settings for part in ("--set", setting)]
        assert launcher.start(*words, "--set", by_name("{C2: 900, C1: 900}")).end() == 0
        with sr.connect(cluster.address, namespace="demo", job="onlooker") as session:
            table = session.table(next(table.name for table in session.core.catalog.list_tables("demo")))
            later = np.full_like(table.pull(key), 5.0)
            table.assign(key, later)
            for model, told in (
                (
                    by_name("{C1: 900, C2: 900}"),
                    r"order \[C2, C1\], and this job \[C1, C2\]; the weights of a tower are",
                ),
                (by_name("{C2: 900, C1: 900}", "[I2, I1]"), r"order \[I1, I2.*\], and this job \[I2, I1"),
            ):
                refused = launcher.start(*words, "--set", model, "--resume", "auto")
                assert refused.end() == 1
                assert re.search(told, refused.complaints[-1])
            np.testing.assert_array_equal(table.pull(key), later)
        same = launcher.start(*words, "--set", by_name("{C2: 900, C1: 900}"), "--resume", "auto")
        assert same.end() == 0, same.err
