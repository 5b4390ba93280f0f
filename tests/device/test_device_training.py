"""``sparserow train``'s trainer with its model on a device: the results of the host, and what a step costs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import sparserow as sr
from sparserow.deploy.bench.counting_device import COUNTS, device
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import load_config
from sparserow.worker.data.synthetic import write_click_log
from sparserow.worker.training.process_group import WorkerGroup
from sparserow.worker.training.ps_backend import PsBackend
from sparserow.worker.training.trainer import Trainer
from sparserow.worker.training.training_report import Silence, TrainResult
from sparserow.worker.training.training_step import TrainingStep

HOST = torch.device("cpu")
SAMPLES, BATCH = 1536, 256


@pytest.fixture(scope="module")
def cluster() -> Iterator[sr.LocalCluster]:
    with sr.local_cluster(shards=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log")
    write_click_log(folder, rows=SAMPLES, test_rows=500)
    return folder


def train(
    cluster: sr.LocalCluster, log: Path, where: torch.device, name: str, *sets: str, hook: object = None
) -> TrainResult:
    job = load_config(
        JobConfig,
        None,
        [
            f"name={name}",
            f"data.train={log / 'train.tsv'}",
            f"data.test={log / 'test.tsv'}",
            "model={class: DLRM, args: {rows: {'*': 20000}, dim: 8, bottom: [16], top: [16]}}",
            f"train.batch_size={BATCH}",
            *sets,
        ],
    )
    with sr.connect(cluster.address, namespace=name, staleness=0) as session:
        backend = PsBackend(job, session, cluster.address)
        trainer = Trainer(job, group=WorkerGroup(device=where), backend=backend, observer=Silence())
        if hook is not None:
            trainer.model.register_forward_pre_hook(hook)
        return trainer.run()


def figures(result: TrainResult) -> tuple[object, ...]:
    return [epoch.train_loss for epoch in result.history], result.test_auc, result.test_log_loss, result.rows


@pytest.mark.parametrize(
    "sets",
    [
        ("train.prefetch=2", "train.epochs=2"),
        ("train.prefetch=0",),
        ("train.prefetch=2", "train.accumulate=2", "train.clip_norm=0.5"),
        ("train.prefetch=2", "model.min_rows=1000", "model.args.rows={C1: 50, C7: 60, '*': 20000}"),
        ("train.prefetch=0", "train.accumulate=2"),
    ],
    ids=["prefetch", "no prefetch", "accumulate", "local tables", "accumulate without prefetch"],
)
def test_a_job_on_a_device_has_the_figures_of_the_host(
    cluster: sr.LocalCluster, log: Path, sets: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    name = "same" + str(abs(hash(request.node.name)))[:8]
    expected = figures(train(cluster, log, HOST, name, *sets))
    with sr.connect(cluster.address, namespace=name) as session:
        for table in session.core.catalog.list_tables(name):
            session.drop_table(table.name)
    got = figures(train(cluster, log, device(), name, *sets))
    for mine, of_host in zip(got, expected, strict=True):  # a column has other strides there
        assert mine == pytest.approx(of_host, rel=1e-6)


@pytest.mark.parametrize("prefetch", [2, 0])
def test_a_step_has_two_crossings_one_back_and_no_hidden_wait(
    cluster: sr.LocalCluster, log: Path, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DLRM with 26 tables and Adam; without prefetch the batch crosses before the step, and its rows in the forward."""
    seen: list[tuple[int, int, int]] = []
    run = TrainingStep.run

    def counted(step: TrainingStep, batch: object, **options: object) -> object:
        result = run(step, batch, **options)
        seen.append((COUNTS.to_device, COUNTS.to_host, COUNTS.waits))
        return result

    monkeypatch.setattr(TrainingStep, "run", counted)
    COUNTS.reset()
    train(cluster, log, device(), f"counted{prefetch}", f"train.prefetch={prefetch}")
    steps, first = len(seen), 2
    assert steps == SAMPLES // BATCH
    there, back, waits = (last - early for last, early in zip(seen[-1], seen[first - 1], strict=True))
    assert there <= 2 * (steps - first), COUNTS.log
    assert (back, waits) == (steps - first, 0), COUNTS.log


def test_a_device_without_memory_ends_the_step_and_names_what_helps(cluster: sr.LocalCluster, log: Path) -> None:
    calls: list[int] = []

    def fail(*_: object) -> None:
        calls.append(len(calls))
        if len(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. More words")

    with pytest.raises(sr.errors.InvalidArgument, match=r"out of memory; lower train.batch_size .* was not committed"):
        train(cluster, log, device(), "small", "train.prefetch=0", hook=fail)
    with sr.connect(cluster.address, namespace="small") as session:
        rows = [
            sum(len(keys) for keys, _ in session.table(t.name).scan())
            for t in session.core.catalog.list_tables("small")
        ]
    assert 0 < sum(rows) < 26 * 3 * BATCH


def test_an_infinite_loss_refuses_the_step(cluster: sr.LocalCluster, log: Path) -> None:
    with pytest.raises(sr.errors.InvalidArgument, match=r"the loss is (inf|nan)"):
        train(
            cluster,
            log,
            device(),
            "wild",
            "train.dense_optimizer={kind: sgd, lr: 1000}",
            "train.row_optimizer={kind: sgd, lr: 1000}",
        )
