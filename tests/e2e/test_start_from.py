"""A run that starts from another one's checkpoint learns on as if the files had been read in one run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from continued_runs import arguments, learnt, write_parts
from sparserow_process import Launcher


@pytest.fixture
def days(tmp_path: Path) -> list[Path]:
    """The lines of a click log as two files of whole batches, and the test file."""
    paths = [tmp_path / "monday.tsv", tmp_path / "tuesday.tsv"]
    return [*paths, write_parts(tmp_path, paths)]


def of_files(files: list[Path], test: Path, url: Path, result: Path) -> list[str]:
    return arguments([f"data.train=[{','.join(map(str, files))}]", f"data.test={test}"], url, result)


def test_two_runs_learn_what_one_does(launcher: Launcher, tmp_path: Path, days: list[Path]) -> None:
    monday, tuesday, test = days
    whole = launcher.start(*of_files([monday, tuesday], test, tmp_path / "whole", tmp_path / "whole.json"))
    assert whole.popen.wait(300) == 0, whole.err
    first = launcher.start(*of_files([monday], test, tmp_path / "first", tmp_path / "first.json"))
    assert first.popen.wait(300) == 0, first.err
    second = launcher.start(
        *of_files([tuesday], test, tmp_path / "second", tmp_path / "second.json"), f"--from={tmp_path / 'first'}"
    )
    assert second.popen.wait(300) == 0, second.err
    assert f"starts from {tmp_path}/first/save-" in second.err
    assert learnt(tmp_path / "second") == learnt(tmp_path / "whole")
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "second"))
    assert (two["test_auc"], two["test_log_loss"]) == (one["test_auc"], one["test_log_loss"])


def test_a_run_that_was_cut_goes_on_from_its_own_checkpoints(
    launcher: Launcher, tmp_path: Path, days: list[Path]
) -> None:
    monday, tuesday, test = days
    first = launcher.start(*of_files([monday], test, tmp_path / "first", tmp_path / "first.json"))
    assert first.popen.wait(300) == 0, first.err
    words = [*of_files([tuesday], test, tmp_path / "second", tmp_path / "second.json"), f"--from={tmp_path / 'first'}"]
    second = launcher.start(*words, "--resume=auto")
    assert second.popen.wait(300) == 0, second.err
    assert "no checkpoint is in" in second.err
    assert "starts from" in second.err
    again = launcher.start(*words, "--resume=auto")
    assert again.popen.wait(300) == 0, again.err
    assert "resumed from" in again.err
    assert "starts from" not in again.err


def test_what_cannot_be_started_from_is_refused_by_name(launcher: Launcher, tmp_path: Path, days: list[Path]) -> None:
    monday, _, test = days
    (tmp_path / "empty").mkdir()
    first = launcher.start(*of_files([monday], test, tmp_path / "first", tmp_path / "first.json"))
    assert first.popen.wait(300) == 0, first.err
    words = of_files([monday], test, tmp_path / "own", tmp_path / "result.json")
    for place, sets, wanted in (
        ("empty", (), r"train\.checkpoint\.start_from: .*empty has no checkpoint"),
        ("own/save-000001", (), r"start_from: .* is of url, where --resume goes on; name another folder"),
        ("first", ("model.args.dim=8",), r"has another model: the shapes differ"),
        ("first", ("train.row_optimizer={kind: adam}",), r"--from: .*has optimizer Adam, the checkpoint has Adagrad"),
    ):
        run = launcher.start(*words, f"--from={tmp_path / place}", *(f"--set={each}" for each in sets))
        assert run.popen.wait(300) == 1
        assert re.search(wanted, run.err), run.err
