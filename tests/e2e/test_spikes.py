"""A loss that jumps sets a job back to a checkpoint before the jump, and the data that made it is passed over."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from sparserow_process import Launcher

# A weight of one number that large numbers move far.
MODEL = """
import torch
from torch import nn


class Steep(nn.Module):
    def __init__(self):
        super().__init__()
        self.users = nn.Embedding(2**20, 1, device="meta")
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, age, user):
        return self.users(user % 2**20).squeeze(-1) + self.weight * age.reshape(-1)
"""

JOB = """
name: ads
data:
  format: csv
  train: {folder}/log.csv
  test: {folder}/test.csv
  csv: {{header: true, label: click}}
  shuffle_rows: 0
features: {{age: {{kind: dense}}, user: {{kind: id}}}}
model: {{class: "steep:Steep", min_rows: 1}}
publish: {{local: null}}
train:
  batch_size: 50
  workers: 2
  threads: 1
  seed: 1
  dense_optimizer: {{kind: sgd, lr: 0.5}}
  row_optimizer: {{kind: adagrad, lr: 0.5}}
  checkpoint: {{url: {folder}/saves, every_steps: 5, keep: 20}}
"""


def write_job(folder: Path) -> Path:
    """A job whose log has 300 samples of large numbers in its middle."""
    draw = random.Random(3)

    def line(*, is_bad: bool = False) -> str:
        user = draw.randrange(40)
        if is_bad:
            return f"{user % 2},{draw.choice((-1, 1)) * draw.uniform(40, 80)},u{user}"
        return f"{int(draw.random() < (0.9 if user % 2 else 0.1))},{draw.random():.3f},u{user}"

    lines = [line(is_bad=6_000 <= number < 6_300) for number in range(9_000)]
    (folder / "log.csv").write_text("\n".join(["click,age,user", *lines]) + "\n")
    (folder / "test.csv").write_text("\n".join(["click,age,user", *(line() for _ in range(2_000))]) + "\n")
    (folder / "steep.py").write_text(MODEL)
    (folder / "job.yaml").write_text(JOB.format(folder=folder))
    return folder / "job.yaml"


def trained(launcher: Launcher, job: Path, *sets: str) -> tuple[dict[str, Any], str]:
    result = job.parent / "result.json"
    launcher.environment["PYTHONPATH"] = str(job.parent)
    run = launcher.start(
        "train", str(job), "--json", str(result), "--overwrite-checkpoints", *(f"--set={each}" for each in sets)
    )
    assert run.end() == 0, run.err
    found: dict[str, Any] = json.loads(result.read_text())
    return found, run.err


@pytest.mark.parametrize("staleness", [0, 4])
def test_a_job_goes_back_and_passes_bad_data_over(launcher: Launcher, tmp_path: Path, staleness: int) -> None:
    job = write_job(tmp_path)
    alone, _ = trained(launcher, job, f"train.staleness={staleness}")
    found, said = trained(launcher, job, f"train.staleness={staleness}", "train.spike={factor: 4, window: 20, skip: 5}")
    assert alone["spikes"] == 0
    assert 1 <= found["spikes"] <= 3
    assert "it goes back to" in said
    assert found["test_log_loss"] < 0.4
    assert found["test_log_loss"] < alone["test_log_loss"]
    assert found["history"][0]["samples"] in range(9_000 - 3 * 500, 9_000 - 499, 100), "steps of 100 are passed over"


def test_a_job_whose_loss_jumps_too_often_ends(launcher: Launcher, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    launcher.environment["PYTHONPATH"] = str(tmp_path)
    run = launcher.start("train", str(job), "--set=train.spike={factor: 4, window: 20, most: 0}")
    assert run.end() == 1
    assert "train.spike: the loss has jumped 1 times" in run.err
