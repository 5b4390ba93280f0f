"""The model of a job file goes to serving at the end of its run, and scores there as it did in training."""

from __future__ import annotations

import json
import random
import shlex
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import sparserow as sr
from long_form import FULL
from sparserow.deploy.launch.security_files import init_signing_key
from sparserow.proto.config.job import JobConfig
from sparserow.proto.errors import InvalidArgument
from sparserow.proto.options.document import load_config
from sparserow.proto.published.proof import sha256_of
from sparserow.proto.published.registry import ModelRegistry
from sparserow.proto.security.security import Security
from sparserow.serving.inference.inference import ServedModel
from sparserow.worker.data import ReadOptions
from sparserow.worker.data.sources import fit_features, open_reader
from sparserow.worker.metrics.binary import auc
from sparserow_process import Launcher

WAIT_SEC = 300


JOB = """
name: ads
data:
  format: csv
  train: {log}
  test: {log}
  csv: {{header: true, label: click}}
features:
  age: {{kind: dense, log1p: true, scale: standardize}}
  user: {{kind: id}}
  item: {{kind: id}}
model: {{class: DLRM, args: {{rows: {{'*': 1000}}}}, min_rows: 1}}
train: {{batch_size: 128, threads: 1, epochs: 2, row_optimizer: {{kind: adagrad, lr: 0.05}}}}
"""


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job over 2,000 clicks, which half of the users make."""
    folder = tmp_path_factory.mktemp("job")
    draw = random.Random(3)
    lines = ["click,user,item,age"]
    for _ in range(2000):
        user = draw.randrange(40)
        lines.append(
            f"{int(draw.random() < (0.8 if user % 2 else 0.2))},u{user},i{draw.randrange(90)},{draw.randrange(80)}"
        )
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    (folder / "job.yaml").write_text(JOB.format(log=folder / "log.csv"))
    return folder / "job.yaml"


@pytest.mark.parametrize("dense", ["ddp", "ps"])
def test_a_job_publishes_its_model(launcher: Launcher, job_file: Path, tmp_path: Path, dense: str) -> None:
    root, result = tmp_path / "models", tmp_path / "result.json"
    settings = [f"publish={{root: '{root}', model: ctr, alias: best}}"]
    if dense == "ps":
        settings += ["train.dense=ps", "train.staleness=2", "train.workers=2"]
    assigned = [part for setting in settings for part in ("--set", setting)]
    run = launcher.start("train", str(job_file), *assigned, "--json", str(result))
    assert run.popen.wait(WAIT_SEC) == 0, run.err
    said = json.loads(result.read_text())
    assert said["kept"] == [f"ctr@1 (best) in {root}"]
    assert said["test_auc"] > 0.75
    assert "the model is kept" in run.out
    tables = {table.schema.name for table in ModelRegistry(str(root)).manifest("ctr", 1).tables}
    assert tables == {"embeddings.tables.user", "embeddings.tables.item"}, "the tower is in the program"
    job = load_config(JobConfig, job_file, settings)
    reader = open_reader(job.data, "test", fit_features(job.data), ReadOptions(batch_size=500))
    scores, labels = [], []
    with (
        sr.local_serving("ctr@best", root=str(root)) as serving,
        sr.ServingClient(serving.addresses[0], model="ctr@best") as client,
        ServedModel(client, str(root)) as model,
    ):
        asked = (
            "query",
            "embeddings.tables.user",
            "u7",
            "--hash",
            "--serving",
            serving.addresses[0],
            "--model",
            "ctr@best",
        )
        for options, is_found in (((), False), (("--modulo", "1000"), True)):
            query = launcher.start(*asked, *options)
            assert query.end() == 0, query.err
            assert ("(default row)" not in query.out) == is_found
        for batch in reader:
            scores.append(model(*(batch.tensors[name] for name in ("age", "user", "item"))))
            labels.append(batch.labels)
    assert auc(torch.cat(scores), torch.cat(labels)) == pytest.approx(said["test_auc"], abs=1e-4)


@pytest.mark.full("test_device_tables.py publishes from a script")
@pytest.mark.parametrize("tables", ["{'*': {placement: device}}", "{'*.user': {placement: auto}}"])
def test_a_job_publishes_tables_on_devices(launcher: Launcher, job_file: Path, tmp_path: Path, tables: str) -> None:
    root, result = tmp_path / "models", tmp_path / "result.json"
    settings = [f"publish={{root: '{root}'}}", f"tables={tables}", "train.workers=2"]
    assigned = [part for setting in settings for part in ("--set", setting)]
    run = launcher.start("train", str(job_file), *assigned, "--json", str(result))
    assert run.popen.wait(WAIT_SEC) == 0, run.err
    said = json.loads(result.read_text())
    assert said["test_auc"] > 0.75
    found = {table.schema.name for table in ModelRegistry(str(root)).manifest("ads", 1).tables}
    assert found == ({"embeddings.tables.item"} if "user" in tables else set())
    job = load_config(JobConfig, job_file, settings)
    assert auc_of(job, root) == pytest.approx(said["test_auc"], abs=1e-4)


def auc_of(job: JobConfig, root: Path) -> float:
    """Of the test files, by the model that ``ads@live`` names, as a serving process has it."""
    scores, labels = [], []
    with (
        sr.local_serving("ads", root=str(root)) as serving,
        sr.ServingClient(serving.addresses[0], model="ads") as client,
        ServedModel(client, str(root)) as model,
    ):
        for batch in open_reader(job.data, "test", fit_features(job.data), ReadOptions(batch_size=500)):
            scores.append(model(*(batch.tensors[name] for name in ("age", "user", "item"))))
            labels.append(batch.labels)
    return auc(torch.cat(scores), torch.cat(labels))


def run_shell(launcher: Launcher, command: str) -> None:
    """Runs what the end of a run names, and nothing else."""
    words = shlex.split(command)
    assert words[0] == "sparserow"
    done = launcher.start(*words[1:])
    assert done.end() == 0, done.err


def test_a_model_is_kept_by_default(launcher: Launcher, job_file: Path, tmp_path: Path) -> None:
    root, result = tmp_path / "kept-models", tmp_path / "result.json"
    for number in range(1, 3):
        run = launcher.start(
            "train", str(job_file), "--json", str(result), within=("env", "-C", str(tmp_path)), keeps=True
        )
        assert run.popen.wait(WAIT_SEC) == 0, run.err
        said = json.loads(result.read_text())
        assert said["kept"] == [f"ads@{number} in {root}"]
        assert f"to publish the model: sparserow alias ads@live {number} --root {root}\n" in run.out
        assert f"to serve the model: sparserow serve --root {root} --model ads\n" in run.out
    assert ModelRegistry(str(root)).aliases("ads") == {}, "a run moves no alias by itself"
    run_shell(launcher, said["commands"]["publish"])
    assert auc_of(load_config(JobConfig, job_file), root) == pytest.approx(said["test_auc"], abs=1e-4)


# test_a_job_publishes_its_model has a tower on the servers in its short form.
@pytest.mark.parametrize("dense", ["ddp", *(["ps"] if FULL else [])])
def test_of_a_running_cluster_the_program_is_kept(
    launcher: Launcher, job_file: Path, tmp_path: Path, dense: str
) -> None:
    keep, result = tmp_path / "kept", tmp_path / "result.json"
    with sr.local_cluster(shards=2) as cluster:
        settings = [f"cluster.address={cluster.address}", f"publish.local={keep}", f"train.dense={dense}"]
        settings += ["train.staleness=2"] if dense == "ps" else []
        assigned = [part for setting in settings for part in ("--set", setting)]
        run = launcher.start("train", str(job_file), *assigned, "--json", str(result), keeps=True)
        assert run.popen.wait(WAIT_SEC) == 0, run.err
        said = json.loads(result.read_text())
        assert said["kept"] == [f"its program in {keep}/ads.program.pt2", f"rows in namespace ads of {cluster.address}"]
        assert {path.name for path in keep.iterdir()} == {"ads.program.pt2", "ads.features"}, "rows are not copied"
        publish = said["commands"]["publish"]
        assert publish in run.out
        words = shlex.split(publish)[1:]
        lacks = launcher.start(*words, "--without", "embeddings.tables.item")
        assert "looks up table 'ads/embeddings.tables.item', which is not published" in lacks.error_line()
        lacks = launcher.start(*[word.replace("program.pt2", "nothing.pt2") for word in words])
        assert "nothing.pt2 does not exist" in lacks.error_line()
        run_shell(launcher, publish)
    tables = {table.schema.name for table in ModelRegistry(str(keep)).manifest("ads", 1).tables}
    assert tables == {"embeddings.tables.user", "embeddings.tables.item"}
    assert auc_of(load_config(JobConfig, job_file), keep) == pytest.approx(said["test_auc"], abs=1e-4)


def test_a_folder_that_cannot_be_used_fails_no_run_that_did_not_name_it(
    launcher: Launcher, job_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "kept-models").write_text("a file")
    run = launcher.start("train", str(job_file), within=("env", "-C", str(tmp_path)), keeps=True)
    assert run.popen.wait(WAIT_SEC) == 0, run.err
    assert "nowhere, as" in run.out
    assert "to publish" not in run.out
    named = launcher.start("train", str(job_file), "--set", f"publish.local={tmp_path}/kept-models", keeps=True)
    assert "kept-models" in named.error_line()
    published = launcher.start("train", str(job_file), "--set", f"publish.root={tmp_path}/kept-models")
    assert "kept-models" in published.error_line(), "it is said before the run, and not after it"


def test_a_job_signs_its_rows_where_it_asks_to(launcher: Launcher, job_file: Path, tmp_path: Path) -> None:
    init_signing_key(tmp_path, "publisher")
    security = tmp_path / "security.yaml"
    security.write_text("signing_key: publisher.key\nverification_key: publisher.pub\n")
    asked = ("train", str(job_file), "--set", f"publish={{root: '{tmp_path}/models', sign: rows}}")
    refused = launcher.start(*asked).error_line()
    assert "publish.sign: has no effect without a signing_key" in refused, "it is said before the run"
    run = launcher.start(f"--security={security}", *asked)
    assert run.popen.wait(WAIT_SEC) == 0, run.err
    registry = ModelRegistry(str(tmp_path / "models"))
    manifest = registry.trusted_manifest("ads", 1, Security.load(security))
    assert manifest.sign == "rows"
    files = registry.folder("ads", 1)
    parts = [part for table in manifest.tables for part in table.parts]
    assert parts
    assert [part.sha256 for part in parts] == [sha256_of([files.read(part.file)]) for part in parts]


@pytest.mark.parametrize("where", ["own cluster", "running cluster", "no keep"])
def test_a_model_that_cannot_be_published_at_the_end_is_kept(
    launcher: Launcher, job_file: Path, tmp_path: Path, where: str
) -> None:
    """The root was writable when the run began, which is probed, and is none when it ends."""
    root, keep, result = tmp_path / "models", tmp_path / "kept", tmp_path / "result.json"
    with ExitStack() as stack:
        settings = [f"publish={{root: '{root}', model: ctr}}", "train.epochs=40"]
        settings += ["publish.local=null"] if where == "no keep" else [f"publish.local={keep}"]
        if where == "running cluster":
            settings.append(f"cluster.address={stack.enter_context(sr.local_cluster(shards=1)).address}")
        assigned = [part for setting in settings for part in ("--set", setting)]
        run = launcher.start("train", str(job_file), *assigned, "--json", str(result), keeps=True)
        run.wait_for("epoch 1/40")
        assert list(root.iterdir()) == [], "what was probed is gone"
        root.rmdir()
        root.write_text("a file")
        assert run.popen.wait(WAIT_SEC) == 3, run.err
    said = json.loads(result.read_text())
    assert f"publish.root {root}: the model could not be published" in said["problem"]
    assert f"sparserow: publish.root {root}: the model could not be published" in run.err
    assert len(said["history"]) == 40
    if where == "own cluster":
        assert said["kept"] == [f"ads@1 in {keep}"]
        run_shell(launcher, said["commands"]["publish"])
        assert auc_of(load_config(JobConfig, job_file), keep) == pytest.approx(said["test_auc"], abs=1e-4)
    elif where == "running cluster":
        assert said["kept"][0] == f"its program in {keep}/ads.program.pt2"
    else:
        assert said["kept"] == ["nowhere, as publish.local is null"]


def test_a_run_that_keeps_nothing_says_so(launcher: Launcher, job_file: Path) -> None:
    run = launcher.start("train", str(job_file))
    assert run.popen.wait(WAIT_SEC) == 0, run.err
    assert "nowhere: publish.root and publish.local" in run.out


def test_a_folder_for_models_has_an_effect_or_is_refused(job_file: Path) -> None:
    local = ["model.backend=local", "train.row_optimizer={kind: sgd}"]
    with pytest.raises(InvalidArgument, match=r"publish: needs model\.backend ps"):
        load_config(JobConfig, job_file, [*local, "publish.local=a"])
    load_config(JobConfig, job_file, local)


def test_a_local_model_is_not_published(job_file: Path) -> None:
    settings = ["model.backend=local", "train.row_optimizer={kind: sgd}", "publish={root: models}"]
    with pytest.raises(InvalidArgument, match=r"publish: needs model\.backend ps"):
        load_config(JobConfig, job_file, settings)
