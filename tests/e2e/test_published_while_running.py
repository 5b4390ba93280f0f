"""A job publishes its model while it runs, and the run is the same as without."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from sparserow.proto.published.registry import ModelRegistry
from sparserow_process import Launcher

WAIT_SEC = 300
ROWS = 6_000
BEGIN = 1_700_000_000

JOB = """
name: ads
data:
  format: csv
  {source}
  test: {folder}/log.csv
  csv: {{header: true, label: click{time}}}
features:
  age: {{kind: dense}}
  user: {{kind: id}}
model: {{class: DLRM, args: {{rows: {{'*': 1000}}}}, min_rows: 1}}
train: {{batch_size: 50, epochs: {epochs}, seed: 1, workers: 2, threads: 1, {train}}}
"""


def write_job(folder: Path, *, epochs: int = 4, train: str = "staleness: 0", source: str = "", time: str = "") -> Path:
    draw = random.Random(3)
    lines = ["click,age,user,at"]
    for number in range(ROWS):
        user = draw.randrange(60)
        lines.append(f"{int(draw.random() < user / 60)},{draw.random():.3f},u{user},{BEGIN + number}")
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    path = folder / "job.yaml"
    source = source or f"train: {folder}/log.csv"
    path.write_text(JOB.format(folder=folder, epochs=epochs, train=train, source=source, time=time))
    return path


def trained(launcher: Launcher, job: Path, *sets: str) -> dict[str, Any]:
    result = job.parent / "result.json"
    run = launcher.start("train", str(job), "--json", str(result), *(f"--set={each}" for each in sets))
    assert run.popen.wait(WAIT_SEC) == 0, run.err
    found: dict[str, Any] = json.loads(result.read_text())
    return found


@pytest.mark.parametrize("train", ["staleness: 0", "dense: ps, staleness: 2"])
def test_versions_come_while_the_run_goes_on_and_old_ones_go(launcher: Launcher, tmp_path: Path, train: str) -> None:
    job = write_job(tmp_path, train=train)
    root = tmp_path / "models"
    with_versions = trained(launcher, job, f"publish={{root: {root}, every: 0.2s, keep: 2}}")
    registry = ModelRegistry(str(root))
    versions, live = registry.versions("ads"), registry.aliases("ads")["live"]
    assert versions[-1] >= 3, "the last is of the end of the run"
    assert set(live.versions) == {versions[-1]}
    assert len(versions) <= 4, "two, that which the alias names, and that which it named before"
    cards = [registry.manifest("ads", version).card for version in versions]
    assert [card["step"] for card in cards] == sorted(card["step"] for card in cards)
    assert "samples" in cards[0]
    if "ps" not in train:  # where workers do not meet, no two runs are alike
        alone = trained(launcher, job, f"publish={{root: {tmp_path / 'others'}}}")
        assert alone["test_log_loss"] == with_versions["test_log_loss"]
        assert ModelRegistry(str(tmp_path / "others")).versions("ads") == [1]


def test_versions_follow_the_times_of_events(launcher: Launcher, tmp_path: Path) -> None:
    saves = f"checkpoint: {{url: {tmp_path}/saves, every_steps: 1000}}"
    stream = f"stream: {{follow: {{files: {tmp_path}/log.csv, age: 0s}}, like: {tmp_path}/log.csv, until: latest"
    source = f"{stream}, event_time: {{}}}}"
    job = write_job(
        tmp_path, epochs=1, train=f"staleness: 0, {saves}", source=source, time=", timestamp: at, timestamp_unit: s"
    )
    job.write_text(job.read_text().replace("epochs: 1, ", ""))
    root = tmp_path / "models"
    publish = f"publish={{root: {root}, every: 20min, by: event_time, least_pause: 0s, keep: 20}}"
    trained(launcher, job, publish)
    registry = ModelRegistry(str(root))
    cards = [registry.manifest("ads", version).card for version in registry.versions("ads")]
    marks = [card["watermark"] for card in cards if "watermark" in card]
    assert 2 <= len(marks) <= ROWS // 1200 + 1
    assert marks == sorted(set(marks))


def place_a_file(path: Path) -> None:
    """Puts a file in the place of a folder, in which a publication may be at work."""
    while True:
        shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(IsADirectoryError):
            path.write_text("no folder")
            return


def test_a_version_that_cannot_be_published_does_not_end_the_run(launcher: Launcher, tmp_path: Path) -> None:
    job, root, result = write_job(tmp_path, epochs=16), tmp_path / "models", tmp_path / "result.json"
    publish = f"publish={{root: {root}, every: 0.5s}}"
    run = launcher.start("train", str(job), "--json", str(result), f"--set={publish}")
    run.wait_for(r"ads@1: a program")
    place_a_file(root / "ads")
    run.popen.wait(WAIT_SEC)
    assert "no version was published" in run.err
    found = json.loads(result.read_text())
    assert found["epochs"] == 16
    assert "could not be published" in found["problem"], "that at the end fails as well"
