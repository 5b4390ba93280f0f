"""What rows of int8 cost in quality: the test AUC of a model of UCI Adult, served in both forms. Skipped where the file
is absent (``../shared/data`` beside the checkout, or SPARSEROW_TEST_DATA)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

import sparserow as sr
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import load_config
from sparserow.worker.data import ReadOptions
from sparserow.worker.data.sources import fit_features, open_reader
from sparserow.worker.metrics.binary import auc
from sparserow.worker.publish.by_position import by_position
from sparserow.worker.training.build_model import build_model

ROOT = Path(__file__).resolve().parents[2]


def test_auc_with_int8_rows_on_adult(tmp_path: Path) -> None:
    data = Path(os.environ.get("SPARSEROW_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not (data / "adult.data").is_file():
        pytest.skip(f"no {data}/adult.data; set SPARSEROW_TEST_DATA")
    sets = [f"data.train={data / 'adult.data'}", f"data.test={data / 'adult.test'}"]
    config = load_config(JobConfig, ROOT / "deploy" / "jobs" / "adult.yaml", sets)
    features = fit_features(config.data)
    torch.manual_seed(0)
    root = str(tmp_path)
    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, "adult") as session:
        model = session.distribute(
            build_model(config.model, features.spec), optimizer=sr.optim.Adagrad(lr=0.02), min_rows=1
        )
        dense = torch.optim.AdamW(model.parameters(), lr=0.002, weight_decay=0.01)
        for batch in open_reader(config.data, "train", features, ReadOptions(batch_size=256)):
            logits = model(**batch.tensors)
            torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
            session.step(dense)
            dense.zero_grad()
        tests = list(open_reader(config.data, "test", features, ReadOptions(batch_size=2048)))
        example, whole = tuple(tests[0].tensors.values()), by_position(model, tuple(tests[0].tensors))
        for name, dtype in (("float", None), ("small", "int8")):
            session.publish(name, root=root, model=whole, example=example, dtype=dtype)
    found = {}
    for name in ("float", "small"):
        with (
            sr.local_serving(name, root=root) as serving,
            sr.ServingClient(serving.addresses) as client,
            sr.ServedModel(client, root) as served,
        ):
            logits = np.concatenate([served(*batch.tensors.values()).numpy() for batch in tests])
        found[name] = auc(logits, np.concatenate([batch.labels.numpy() for batch in tests]))
    print(f"test AUC: float32 {found['float']:.5f}, int8 {found['small']:.5f}")
    assert found["float"] > 0.9
    assert abs(found["float"] - found["small"]) <= 0.001
