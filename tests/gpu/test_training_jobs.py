"""``sparserow train`` on a CUDA device: the losses and scores of the host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sparserow.cpp_ext._client", reason="the native libraries are not built", exc_type=ImportError)
from sparserow.worker.data import write_click_log

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
JOB = str(Path(__file__).resolve().parents[2] / "deploy" / "jobs" / "demo.yaml")
MODEL = "model={class: DLRM, args: {rows: {'*': 5000}, dim: 8, bottom: [16], top: [16]}, min_rows: 1}"


def job(tmp_path: Path, name: str, *sets: str) -> subprocess.CompletedProcess[str]:
    given = [f"--set={each}" for each in ("publish.local=null", MODEL, "train.batch_size=96", *sets)]
    command = [sys.executable, "-m", "sparserow.deploy.cli", "train", JOB, *given]
    return subprocess.run(
        [*command, "--json", str(tmp_path / f"{name}.json")], capture_output=True, text=True, timeout=240
    )


@pytest.mark.parametrize(
    "sets",
    [("train.prefetch=2",), ("train.prefetch=0", "train.accumulate=2", "train.clip_norm=0.5")],
    ids=["prefetched", "accumulated and clipped"],
)
def test_a_job_on_cuda_gives_what_it_gives_on_the_host(tmp_path: Path, sets: tuple[str, ...]) -> None:
    log = write_click_log(tmp_path, rows=3_000, test_rows=701, seed=3)
    figures = {}
    for device in ("cpu", "auto"):
        data = (f"data.train={log.train}", f"data.test={log.test}", "train.workers=1")
        done = job(tmp_path, device, *data, *sets, f"train.device={device}")
        assert done.returncode == 0, done.stderr
        told = json.loads((tmp_path / f"{device}.json").read_text())
        figures[device] = [epoch["train_loss"] for epoch in told["history"]] + [told["test_auc"]]
        if device == "auto":
            assert "cuda" in done.stdout + done.stderr
    assert figures["auto"] == pytest.approx(figures["cpu"], rel=1e-4)


def test_more_workers_than_devices_are_refused_before_training(tmp_path: Path) -> None:
    log = write_click_log(tmp_path, rows=300, test_rows=101, seed=3)
    workers = torch.cuda.device_count() + 1
    data = (f"data.train={log.train}", f"data.test={log.test}", f"train.workers={workers}")
    done = job(tmp_path, "refused", *data, "train.device=cuda")
    assert done.returncode != 0
    assert "train.device" in done.stderr + done.stdout
