"""The row cache over real shards: fewer rows pulled, none older than allowed, and its figures in a job's result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sparserow as sr
from long_form import FULL
from sparserow.deploy.train.training_display import summary
from sparserow.deploy.train.training_job import run_job
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import load_config

ROWS, DIM, STEPS = 200, 4, 20


def test_rows_of_another_job_are_seen_within_the_staleness() -> None:
    """A worker that only reads beside one that writes: row i holds the number of the write it is from."""
    keys = np.arange(ROWS, dtype=np.uint64)
    with sr.local_cluster(shards=2) as cluster:
        with (
            sr.connect(cluster.address, "ads", job="writer", staleness=None) as writer,
            sr.connect(cluster.address, "ads", staleness=3, cache=sr.RowCache(1 << 20, staleness=3)) as reader,
        ):
            torch.manual_seed(1)
            model = reader.distribute(
                nn.Sequential(nn.Embedding(ROWS, DIM)), optimizer=sr.optim.SGD(lr=1.0), min_rows=1
            )
            rows = writer.table("0")
            for step in range(STEPS):
                rows.assign(keys, np.full((ROWS, DIM), step, dtype=np.float32))
                seen = model(torch.from_numpy(keys.astype(np.int64)))
                assert (seen == step - step % 4).all()  # asked at steps 0, 4, 8, ...
                reader.step(allow_empty=True)
            stats = reader.stats()
        assert stats.cache_misses == ROWS
        assert stats.cache_revalidated == stats.cache_refreshed == (STEPS // 4 - 1) * ROWS
        assert stats.cache_hits == (STEPS - STEPS // 4) * ROWS
        assert stats.rows_pulled == STEPS // 4 * ROWS


def draw(random: np.random.Generator) -> tuple[Any, Any, Any]:
    return random.integers(0, 2, 4096), random.normal(size=4096), random.zipf(1.2, 4096) % 3000


@pytest.mark.parametrize("staleness", ["4", *(["0", "null"] if FULL else [])])
def test_a_job_reports_its_cache(staleness: str, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    random = np.random.default_rng(3)
    lines = [f"{label},{x:.3f},{c}" for label, x, c in zip(*draw(random), strict=True)]
    log.write_text("\n".join(lines) + "\n")
    of_cache = 0 if staleness == "0" else 2
    job = load_config(
        JobConfig,
        None,
        [
            "data.format=csv",
            "data.csv={columns: [y, x, c], label: y}",
            "features={x: {kind: dense}, c: {kind: id}}",
            f"data.train={log}",
            f"data.test={log}",
            "model={class: DeepFM, args: {rows: {'*': 500}, dim: 4, hidden: [8]}, min_rows: 1}",
            "train={workers: 2, batch_size: 128, threads: 1}",
            f"train.staleness={staleness}",
            f"train.cache={{bytes: 1 MiB, staleness: {of_cache}, own_commits: bounded}}",
            "cluster.shards=1",
        ],
    )
    result = run_job(job)
    cache = result.cache
    assert cache["misses"] > 0
    assert cache["revalidated"] >= cache["refreshed"] > 0
    assert (cache["hits"] > 0) == (of_cache > 0)
    # One table of dim + 1 columns.
    assert cache["bytes_saved"] == 20 * (cache["hits"] + cache["revalidated"] - cache["refreshed"])
    assert result.as_dict()["cache"] == cache
    table = summary("job", result)
    assert "row cache" in list(table.columns[0].cells)
