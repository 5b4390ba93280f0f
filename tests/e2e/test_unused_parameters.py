"""Jobs of several workers whose class has a branch that a batch may not take."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from sparserow_process import Launcher

CODE = """\
from torch import Tensor, nn

class Net(nn.Module):
    def __init__(self, always: bool) -> None:
        super().__init__()
        self.id, self.top, self.rare, self.always = nn.Embedding(50, 4), nn.Linear(4, 1), nn.Linear(4, 1), always

    def forward(self, id: Tensor) -> Tensor:
        rows, is_rare = self.id(id), (id == 49).unsqueeze(1)
        out = self.top(rows)
        if self.always or is_rare.any():
            out = out + is_rare * self.rare(rows)
        return out.squeeze(1)
"""
JOB = """
name: branched
data:
  format: csv
  train: FOLDER/log.csv
  test: FOLDER/log.csv
  csv: {columns: [id, label], label: label}
features: {id: {kind: id, vocabulary: FOLDER/ids.txt, unknown: refuse}}
model: {class: "branched_net:Net", args: {always: false}, min_rows: 10}
publish: {local: null}
train:
  workers: 2
  epochs: 2
  batch_size: 20
  threads: 1
  dense_optimizer: {kind: sgd, lr: 0.1}
"""


@pytest.fixture
def job(tmp_path: Path, launcher: Launcher) -> Path:
    """A job of 8 steps an epoch, of which one or two take the branch, on one of the workers."""
    launcher.environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), launcher.environment.get("PYTHONPATH", "")])
    ids = [7 * row % 49 for row in range(320)]
    ids[130] = ids[131] = 49
    (tmp_path / "log.csv").write_text("".join(f"{key},{(key + row) % 2}\n" for row, key in enumerate(ids)))
    (tmp_path / "ids.txt").write_text("".join(f"{key}\n" for key in range(50)))
    (tmp_path / "branched_net.py").write_text(CODE)
    (tmp_path / "job.yaml").write_text(JOB.replace("FOLDER", str(tmp_path)))
    return tmp_path / "job.yaml"


@pytest.mark.parametrize("sets", [(), ("model.backend=local", "train.accumulate=2")], ids=["ps", "local"])
def test_a_branch_that_is_not_taken_names_the_option(launcher: Launcher, job: Path, sets: tuple[str, ...]) -> None:
    run = launcher.start("train", str(job), *(f"--set={each}" for each in sets))
    assert run.end() == 1
    assert run.err.splitlines()[-1] == (
        "sparserow: InvalidArgument: train.find_unused_parameters: false is not enough, as backward did not reach "
        "rare.weight, rare.bias on this worker; allowed: true, for a branch that a batch may not take, or a forward "
        "that uses each parameter"
    )
    assert "finished reduction" not in run.err


@pytest.mark.parametrize("sets", [(), ("model.backend=local", "train.accumulate=2")], ids=["ps", "local"])
def test_the_option_trains_as_a_forward_that_uses_each_parameter(
    launcher: Launcher, job: Path, sets: tuple[str, ...]
) -> None:
    losses = []
    for number, way in enumerate(("train.find_unused_parameters=true", "model.args.always=true")):
        result = job.parent / f"{number}.json"
        run = launcher.start("train", str(job), f"--json={result}", *(f"--set={each}" for each in (way, *sets)))
        assert run.end() == 0, run.err
        losses.append(json.loads(result.read_text())["test_log_loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_one_worker_has_no_use_of_it(launcher: Launcher, job: Path) -> None:
    run = launcher.start("train", str(job), "--workers=1", "--set=train.find_unused_parameters=true")
    assert run.end() == 1
    assert "train.find_unused_parameters: true needs at least 2 workers; this job has 1" in run.err
