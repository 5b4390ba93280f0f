"""The model of a job file goes to serving at the end of its run, and scores there as it did in training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sparserow as sr
import torch
from sparserow.deploy.inference import ServedModel
from sparserow.proto.config import load_config
from sparserow.proto.errors import InvalidArgument
from sparserow.proto.job import JobConfig
from sparserow.worker.data import ReadOptions, fit_features, open_reader, write_click_log
from sparserow.worker.metrics import auc
from sparserow_process import Launcher

JOBS = Path(__file__).resolve().parents[2] / "deploy" / "jobs"
WAIT_SEC = 300


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return write_click_log(tmp_path_factory.mktemp("log"), rows=4000, test_rows=1000, seed=3)


@pytest.mark.parametrize("dense", ["ddp", "ps"])
def test_a_job_publishes_its_model(launcher: Launcher, log, tmp_path: Path, dense: str) -> None:
    root, result = tmp_path / "models", tmp_path / "result.json"
    settings = [
        f"data.train={log.train}",
        f"data.test={log.test}",
        "model.rows=1000",
        "train.workers=2",
        "train.threads=1",
        "train.batch_size=128",
        f"train.dense={dense}",
        f"train.staleness={'0' if dense == 'ddp' else '2'}",
        f"publish={{root: '{root}', model: ctr, alias: best}}",
    ]
    assigned = [part for setting in settings for part in ("--set", setting)]
    run = launcher.start("train", str(JOBS / "demo.yaml"), *assigned, "--json", str(result))
    assert run.popen.wait(WAIT_SEC) == 0, run.err
    said = json.loads(result.read_text())
    assert said["kept"] == [f"ctr@1 (best) in {root}"]
    assert "the model is kept" in run.out
    job = load_config(JobConfig, JOBS / "demo.yaml", settings)
    options = ReadOptions(batch_size=500)
    reader = open_reader(job.data, "test", fit_features(job.data), options)
    scores, labels = [], []
    with (
        sr.local_serving("ctr@best", root=str(root)) as serving,
        sr.ServingClient(serving.addresses[0], model="ctr@best") as client,
        ServedModel(client, str(root)) as model,
    ):
        text = log.train.read_text().splitlines()[0].split("\t")[14]  # of the first key column
        asked = (
            "query",
            "embeddings.tables.C1",
            text,
            "--hash",
            "--serving",
            serving.addresses[0],
            "--model",
            "ctr@best",
        )
        for options_of_key, is_found in (((), False), (("--modulo", "1000"), True)):
            query = launcher.start(*asked, *options_of_key)
            assert query.end() == 0, query.err
            assert ("(default row)" not in query.out) == is_found
        for batch in reader:
            scores.append(model(batch.dense, batch.sparse))
            labels.append(batch.labels)
    assert auc(torch.cat(scores), torch.cat(labels)) == pytest.approx(said["test_auc"], abs=1e-4)


def test_a_run_that_keeps_nothing_says_so(launcher: Launcher, log) -> None:
    settings = [f"data.train={log.train}", f"data.test={log.test}", "model.rows=1000"]
    assigned = [part for setting in settings for part in ("--set", setting)]
    run = launcher.start("train", str(JOBS / "demo.yaml"), *assigned)
    assert run.popen.wait(WAIT_SEC) == 0, run.err
    assert "nowhere: a section publish keeps it" in run.out


def test_a_local_model_is_not_published(log) -> None:
    settings = [f"data.train={log.train}", "model.backend=local", "publish={root: models}"]
    with pytest.raises(InvalidArgument, match=r"publish: needs model\.backend ps"):
        load_config(JobConfig, JOBS / "demo.yaml", settings)
