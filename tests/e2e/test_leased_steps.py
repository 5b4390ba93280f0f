"""Leased data is counted by commits: each batch is one, also where its step was refused."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch

import sparserow as sr
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import load_config
from sparserow.worker.training.process_group import WorkerGroup
from sparserow.worker.training.ps_backend import PsBackend
from sparserow.worker.training.trainer import Trainer
from sparserow.worker.training.training_report import Silence

BATCHES, REFUSED = 12, 3


def test_a_batch_whose_step_is_refused_is_a_commit_of_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("".join(f"{i % 2},k{i % 7}\n" for i in range(BATCHES * 10)))
    sets = [f"data.train={log}", f"data.test={log}", "data.format=csv", "name=ads"]
    sets += [
        "data.csv={columns: [y, c], label: y}",
        "features={c: {kind: id}}",
        "model={class: DeepFM, args: {rows: {'*': 64}, dim: 4}, min_rows: 1}",
    ]
    sets += ["train={batch_size: 10, staleness: null, dense: ps, threads: 1, on_nonfinite: skip}"]
    sets += ["train.elastic={lease_rows: 40}"]
    job = load_config(JobConfig, None, sets)
    with (
        sr.local_cluster(shards=1) as cluster,
        sr.connect(cluster.address, "ads", staleness=None, on_nonfinite="skip") as session,
    ):
        backend = PsBackend(job, session, cluster.address)
        trainer = Trainer(job, group=WorkerGroup(0, 1, meets=False), backend=backend, observer=Silence(), run="r")
        forwards = itertools.count()

        def spoil(module: torch.nn.Module, _: object, logits: torch.Tensor) -> torch.Tensor:
            return logits * float("nan") if module.training and next(forwards) in range(4, 4 + REFUSED) else logits

        trainer._bare.register_forward_hook(spoil)
        result = trainer.run()
        assert result.refused_steps == REFUSED
        assert session.current_step == BATCHES
