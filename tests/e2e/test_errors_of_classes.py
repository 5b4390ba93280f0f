"""What a job says where the code of a class of the user's own raises, and which errors end a job at once."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from sparserow.deploy.train.training_job import run_job
from sparserow.proto.config.job import JobConfig
from sparserow.proto.errors import InvalidArgument, NotFound
from sparserow.proto.options.document import load_config
from sparserow_process import Launcher

CODE = """\
from torch import Tensor, nn

class Net(nn.Module):
    def __init__(self, bad: str) -> None:
        super().__init__()
        if bad == "constructor":
            raise KeyError("sizes")
        self.id, self.top, self.bad = nn.Embedding(50, 4), nn.Linear(4, 1), bad

    def forward(self, id: Tensor) -> Tensor:
        rows = self.id(id)
        if self.bad == "forward":
            raise KeyError("nothing")
        if self.bad == "shapes":
            rows = rows[:, :3]
        return self.top(rows).squeeze(1)
"""
JOB = """
name: faulty
data:
  format: csv
  train: FOLDER/log.csv
  test: FOLDER/log.csv
  csv: {columns: [id, label], label: label}
features: {id: {kind: id, modulo: 50}}
model: {class: "faulty_net:Net", args: {bad: ""}, min_rows: 10}
train:
  workers: 2
  batch_size: 20
  threads: 1
  checkpoint: {url: FOLDER/saves, every_steps: 5}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    draw = np.random.default_rng(3)
    lines = [f"{key},{label}" for key, label in zip(draw.integers(0, 50, 80), draw.integers(0, 2, 80), strict=True)]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "faulty_net.py").write_text(CODE)
    (tmp_path / "job.yaml").write_text(JOB.replace("FOLDER", str(tmp_path)))
    return tmp_path / "job.yaml"


def place(job: Path, line: str, function: str) -> str:
    number = 1 + next(i for i, each in enumerate(CODE.splitlines()) if line in each)
    return f"in {job.parent / 'faulty_net.py'}, line {number}, {function}"


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_a_forward_is_told_as_the_users(launcher: Launcher, job: Path, workers: int) -> None:
    launcher.environment["PYTHONPATH"] = os.pathsep.join([str(job.parent), launcher.environment.get("PYTHONPATH", "")])
    # With two workers, an error of Sparserow or of a peer would begin the run again.
    options = ("--set=model.args.bad=forward", f"--workers={workers}", *(["--resume=auto"] if workers > 1 else []))
    run = launcher.start("--debug", "train", str(job), *options)
    assert run.end() == 1
    where = place(job, "nothing", "forward")
    wanted = f"sparserow: InvalidArgument: model.class: faulty_net:Net raised KeyError: 'nothing', {where}"
    assert run.err.splitlines()[-1] == wanted
    assert run.err.count('raise KeyError("nothing")') == 1, "the traceback of the worker that raised"
    assert "begins again" not in run.err


@pytest.mark.parametrize(
    ("sets", "kind", "wanted"),
    [
        (
            ["model.args.bad=constructor"],
            InvalidArgument,
            "Net refuses them: KeyError: 'sizes', in .*faulty_net.py, line 7",
        ),
        (["data.test=/no/such.csv"], NotFound, "data.test: /no/such.csv"),
        (
            ["data.test=/no/such.csv", "model={class: DLRM, args: {rows: {'*': 50}}, min_rows: 1}"],
            NotFound,
            "data.test: /no/such.csv",
        ),
    ],
)
def test_errors_that_no_new_start_mends_end_a_run_at_once(
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    sets: list[str],
    kind: type[Exception],
    wanted: str,
) -> None:
    monkeypatch.syspath_prepend(str(job.parent))
    with pytest.raises(kind, match=wanted):
        run_job(load_config(JobConfig, job, sets), resume="auto")
    assert capfd.readouterr().err == ""
