"""The main job on real input: UCI Adult and a sample of Criteo; skipped where the files are absent.

The folder is ``../shared/data`` beside the checkout, or SPARSEROW_TEST_DATA.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
import yaml

import sparserow as sr
from sparserow.deploy.cli import main
from sparserow.proto.config.data_config import DataConfig
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import load_config
from sparserow.worker.data import ReadOptions
from sparserow.worker.data.sources import fit_features, open_reader
from sparserow.worker.metrics.binary import auc

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "deploy" / "jobs"


@pytest.fixture
def data():
    folder = Path(os.environ.get("SPARSEROW_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "adult.data").is_file():
        pytest.skip(f"no {folder}/adult.data; set SPARSEROW_TEST_DATA")
    return folder


def adult(launcher, data: Path, result: Path, *sets: str) -> dict:
    settings = [f"data.train={data / 'adult.data'}", f"data.test={data / 'adult.test'}", *sets]
    assigned = [part for setting in settings for part in ("--set", setting)]
    run = launcher.start("train", str(JOBS / "adult.yaml"), *assigned, "--json", str(result))
    assert run.popen.wait(600) == 0, run.err
    assert not launcher.living()
    figures: dict = json.loads(result.read_text())
    return figures


def test_adult_on_servers(launcher, data, tmp_path):
    figures = adult(launcher, data, tmp_path / "result.json")
    assert figures["test_auc"] >= 0.925
    assert (figures["shards"], figures["bad_lines"]) == (2, 0)
    assert figures["history"][0]["samples"] == 32_561


@pytest.mark.full
def test_adult_equals_plain_torch_over_three_seeds(launcher, data, tmp_path):
    aucs: dict[str, list[float]] = {"ps": [], "local": []}
    for seed in range(3):
        for backend, found in aucs.items():
            result = tmp_path / f"{backend}-{seed}.json"
            sets = ["cluster={}"] if backend == "local" else []
            sets += [f"train.seed={seed}", f"model.backend={backend}"]
            found.append(adult(launcher, data, result, *sets)["test_auc"])
    print("test AUC by seed", aucs)
    assert mean(aucs["ps"]) >= 0.900
    assert all(abs(ps - local) <= 0.002 for ps, local in zip(aucs["ps"], aucs["local"], strict=True))


@pytest.mark.full
def test_adult_is_learnt_as_well_however_stale(launcher, data, tmp_path):
    aucs: dict[str, list[float]] = {"0": [], "2": [], "null": []}
    for seed in range(3):
        for staleness, found in aucs.items():
            sets = [f"train.seed={seed}", f"train.staleness={staleness}", "train.workers=2", "train.dense=ps"]
            sets.append("train.dense_optimizer={kind: adam, lr: 0.002}")
            found.append(adult(launcher, data, tmp_path / f"{staleness}-{seed}.json", *sets)["test_auc"])
    print("test AUC of two workers by seed", aucs)
    means = [mean(found) for found in aucs.values()]
    assert min(means) >= 0.925
    assert max(means) - min(means) <= 0.003


def test_adult_reads_whole(data):
    sets = [f"data.train={data / 'adult.data'}", f"data.test={data / 'adult.test'}"]
    config = load_config(JobConfig, JOBS / "adult.yaml", sets).data
    features = fit_features(config)
    for which, samples, positive in (("train", 32_561, 7_841), ("test", 16_281, 3_846)):
        batches = list(open_reader(config, which, features, ReadOptions(batch_size=4096)))
        assert sum(len(batch) for batch in batches) == samples
        assert sum(int(batch.labels.sum()) for batch in batches) == positive


def test_criteo_sample_reads_whole(data):
    path = data / "criteo_sample.csv"
    config = load_config(DataConfig, None, [f"train={path}", f"test={path}"])
    batches = list(open_reader(config, "train", fit_features(config), ReadOptions(batch_size=64)))
    assert [len(batch) for batch in batches] == [64, 64, 64, 8]
    lines = path.read_text().splitlines()[1:]
    assert sum(int(batch.labels.sum()) for batch in batches) == sum(line[0] == "1" for line in lines)


def test_adult_is_predicted_as_it_was_trained(launcher, data, tmp_path):
    """A job with features over columns without a header, with spaces and comments: its test file, predicted, has the
    AUC of the job's own test, because ``predict`` reads it by the dialect that was published with the features."""
    job = yaml.safe_load((JOBS / "adult.yaml").read_text())
    job["data"] |= {"train": str(data / "adult.data"), "test": str(data / "adult.test")}
    job["train"]["epochs"] = 1
    job["publish"] = {"root": str(tmp_path / "models"), "model": "adult"}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))
    run = launcher.start("train", str(tmp_path / "job.yaml"), "--json", str(tmp_path / "result.json"))
    assert run.popen.wait(600) == 0, run.err
    trained = json.loads((tmp_path / "result.json").read_text())["test_auc"]
    assert trained > 0.9

    commented = tmp_path / "with_comments.txt"
    lines = (data / "adult.test").read_text().splitlines()
    commented.write_text("\n".join(["|1x3 Cross validator", *lines, ""]))
    labels = np.array([">50K" in line for line in lines if line.strip()])
    with sr.local_serving("adult", root=str(tmp_path / "models")) as serving, pytest.raises(SystemExit) as ended:
        main(
            ["predict", "--model=adult", f"--root={tmp_path / 'models'}", f"--serving={','.join(serving.addresses)}",
             f"--input={commented}", f"--output={tmp_path / 'scores'}"]
        )  # fmt: skip
    assert ended.value.code == 0
    scores = np.array([float(line) for line in (tmp_path / "scores").read_text().split()])
    assert len(scores) == len(labels)
    assert auc(scores, labels) == pytest.approx(trained, abs=1e-6)
