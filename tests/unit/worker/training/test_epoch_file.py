"""Epochs that a run has told: read by the same run alone, and a file that is broken stops no run."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparserow.worker.training.epoch_file import EpochFile
from sparserow.worker.training.run_identity import RunIdentity
from sparserow.worker.training.training_report import EpochResult

EPOCHS = {1: EpochResult(1, 0.5, 100, 10.0, 0.75, 0.5), 2: EpochResult(2, 0.25, 100, 20.0, 0.8, 0.4)}


def test_the_same_run_reads_what_it_told_and_another_does_not(tmp_path: Path) -> None:
    mine = EpochFile(str(tmp_path), RunIdentity("mine"))
    assert mine.read() == {}
    mine.write(EPOCHS.values())
    assert EpochFile(str(tmp_path), RunIdentity("mine")).read() == EPOCHS
    assert EpochFile(str(tmp_path), RunIdentity("another")).read() == {}
    assert EpochFile(str(tmp_path), RunIdentity("another", is_again=True)).read() == EPOCHS
    mine.write([])
    assert mine.read() == {}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"run": "mine", "epochs": [{"epoch": 1}]}'])
def test_a_broken_file_is_told_and_left(tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    (tmp_path / "epochs.json").write_text(text)
    assert EpochFile(str(tmp_path), RunIdentity("mine")).read() == {}
    assert "epochs.json cannot be read" in caplog.text
