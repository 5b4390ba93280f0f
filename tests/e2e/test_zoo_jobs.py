"""Job files of the zoo train on the synthetic log of sales; SASRec learns the rule by which items follow each other."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import sparserow as sr
from sparserow.proto.published.registry import ModelRegistry
from sparserow.worker.data import SalesLog, write_sales_log
from sparserow_process import Launcher

JOBS = Path(__file__).resolve().parents[2] / "deploy" / "jobs"
METRICS = {
    "dlrm": "label.auc",
    "deepfm": "label.auc",
    "wide_deep": "label.auc",
    "dcn": "label.auc",
    "autoint": "label.auc",
    "din": "label.gauc",
    "mmoe": "buy.auc",
    "two_tower": "click.ndcg@10",
}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> SalesLog:
    folder = tmp_path_factory.mktemp("sales")
    return write_sales_log(folder, rows=8_000, test_rows=1_000, users=500, items=200, history=6, candidates=10, seed=6)


def trained(launcher: Launcher, log: SalesLog, job: str, result: Path, *sets: str) -> dict[str, float]:
    """The metrics of the last epoch of a job."""
    options = [f"data.train={log.train}", f"data.test={log.test}", "train.batch_size=128", "cluster.shards=1", *sets]
    words = [word for each in options for word in ("--set", each)]
    run = launcher.start("train", str(JOBS / f"{job}.yaml"), *words, "--json", str(result))
    assert run.popen.wait(300) == 0, run.err
    metrics: dict[str, float] = json.loads(result.read_text())["history"][-1]["metrics"]
    return metrics


def test_sasrec_learns_which_item_follows(launcher: Launcher, log: SalesLog, tmp_path: Path) -> None:
    sizes = ("model.args.dim=16", "model.args.max_len=8", "model.args.candidates=10", "train.dense_optimizer.lr=0.003")
    metrics = trained(launcher, log, "sasrec", tmp_path / "result.json", "train.epochs=3", *sizes)
    assert 0.6 < metrics["next.hit_rate@1"] < log.hit_rate + 0.05, "0.1 is chance"


@pytest.mark.full
@pytest.mark.parametrize("job", METRICS)
def test_every_job_trains_and_measures_its_tasks(launcher: Launcher, log: SalesLog, tmp_path: Path, job: str) -> None:
    metrics = trained(launcher, log, job, tmp_path / "result.json")
    assert math.isfinite(metrics[METRICS[job]])


NEGATIVES = "{next: {label: click, loss: softmax, item: next, negatives: {kind: popularity, per_positive: 9}}}"
NEXT = (
    "data.columns={labels: {click: {}}}",
    "features={next: {kind: id, modulo: 100000}, history: {kind: sequence, modulo: 100000, max_len: 8}}",
    "model.args={rows: {next: 100000}, item: next, history: history, dim: 16, max_len: 8, candidates: 12}",
    f"tasks={NEGATIVES}",
    "train.dense_optimizer.lr=0.003",
    "train.epochs=3",
    "train.workers=2",
)


def test_sasrec_learns_from_drawn_negatives_and_ranks_candidates_when_served(
    launcher: Launcher, log: SalesLog, tmp_path: Path
) -> None:
    root = str(tmp_path / "models")
    metrics = trained(launcher, log, "sasrec", tmp_path / "result.json", *NEXT, f"publish.root={root}")
    assert 0.6 < metrics["next.hit_rate@1"] < log.hit_rate + 0.05, "0.1 is chance"
    test = pq.read_table(log.test).slice(0, 200)
    asked = test.select(["history"]).append_column("next", test["candidates"])
    with (
        sr.local_serving("clicks", root=root) as serving,
        sr.ServingClient(serving.addresses) as client,
        sr.ServedModel(client, root) as served,
    ):
        best = served.predict(asked).output.argmax(dim=1).numpy()
    registry = ModelRegistry(root)
    card = registry.manifest("clicks", registry.versions("clicks")[-1]).card
    assert card["next.mrr"] == pytest.approx(metrics["next.mrr"])
    assert "auc" not in card, "no task has an AUC"
    assert (best == test["position"].to_numpy()).mean() > 0.6, "a caller gives the candidates that it wants ranked"


@pytest.mark.full("its parts are in tests/unit/worker/models/test_two_tower.py")
def test_item_vectors_of_a_published_retriever_give_its_scores(
    launcher: Launcher, log: SalesLog, tmp_path: Path
) -> None:
    root = str(tmp_path / "models")
    sets = ("model.args.rows={user: 1000, item: 1000}", "model.min_rows=10", "model.args.out=8", f"publish.root={root}")
    trained(launcher, log, "two_tower", tmp_path / "result.json", *sets)
    test = pq.read_table(log.test).slice(0, 300)
    items, users = tmp_path / "items.parquet", tmp_path / "users.parquet"
    pq.write_table(test.select(["item", "price", "at"]), items, row_group_size=70)
    pq.write_table(test.select(["user", "age", "history"]), users)
    vectors = {}
    with sr.local_serving("clicks", root=root) as serving:
        common = ["predict", "--model=clicks", f"--root={root}", f"--serving={','.join(serving.addresses)}", "--nulls"]
        for name, path, keep in (("item", items, "item"), ("user", users, "user")):
            output = tmp_path / f"{name}_vectors.parquet"
            words = [f"--input={path}", f"--output={output}", f"--keep={keep}", f"--only={name}_vector"]
            run = launcher.start(*common, *words, "--batch-rows=64")
            assert run.popen.wait(120) == 0, run.err
            assert "300 rows in" in run.out
            vectors[name] = pq.read_table(output)
        with sr.ServingClient(serving.addresses) as client, sr.ServedModel(client, root) as served:
            out = served.predict(test).output
        again = launcher.start(*common, f"--input={items}", f"--output={tmp_path / 'x.parquet'}", "--only=vector")
        assert again.popen.wait(120) == 1
        assert "--only vector: the model has no such output; it has: score, user_vector, item_vector" in again.err
    assert vectors["item"].column_names == ["item", "item_vector"]
    assert vectors["item"]["item"].to_pylist() == test["item"].to_pylist()
    made = {name: np.array(table[f"{name}_vector"].to_pylist()) for name, table in vectors.items()}
    assert made["item"].shape == (300, 8)
    np.testing.assert_allclose(np.linalg.norm(made["item"], axis=1), 1, atol=1e-5)
    scores = (made["user"] * made["item"]).sum(axis=1) / 0.05
    np.testing.assert_allclose(scores, out["score"].numpy(), atol=1e-4)
    assert not list(tmp_path.glob("*.part")), "no file is left half written"
