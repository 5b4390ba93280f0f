"""A job of one day after another: each begins with what the day before has learnt, whatever is killed in between."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from continued_runs import arguments, learnt, write_parts
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.checkpoint.manifest import list_names
from sparserow_process import Launcher, wait_until

NO_FILES = ("data.train=null", "data.test=null")
DAYS = ("2026-11-29", "2026-11-30", "2026-12-01")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A folder with a file of whole batches for each of three days, and a small one of a fourth."""
    test = write_parts(tmp_path, [tmp_path / "log" / f"dt={day}" / "a.tsv" for day in DAYS])
    (tmp_path / "log" / "dt=2026-12-02").mkdir()
    shutil.copy(test, tmp_path / "log" / "dt=2026-12-02" / "a.tsv")
    return tmp_path / "log"


def of_days(log: Path, url: Path, result: Path, *sets: str) -> list[str]:
    path = f"{log}/dt={{day}}/*.tsv"
    return arguments([f"data.days={{path: '{path}', first: {DAYS[0]}}}", *NO_FILES], url, result, *sets)


def test_days_learn_what_one_run_does_also_when_one_is_killed(launcher: Launcher, tmp_path: Path, log: Path) -> None:
    files = ",".join(f"{log}/dt={day}/a.tsv" for day in DAYS)
    data = [f"data.train=[{files}]", f"data.test={log}/dt=2026-12-02/a.tsv"]
    whole = launcher.start(*arguments(data, tmp_path / "whole", tmp_path / "whole.json"))
    assert whole.popen.wait(300) == 0, whole.err
    words = of_days(log, tmp_path / "days", tmp_path / "days.json")
    cut = launcher.start(*words)
    second = Folder(str(tmp_path / "days" / DAYS[1]))
    wait_until(lambda: list_names(second) or cut.popen.poll() is not None, "a checkpoint of the second day", 200)
    cut.popen.kill()
    cut.end()
    wait_until(lambda: not launcher.by_role()["worker"], "the workers to end")
    again = launcher.start(*words)
    assert again.popen.wait(300) == 1
    assert re.search(rf"has checkpoints of {DAYS[0]} of an earlier run; go on from there \(--resume auto\)", again.err)
    rest = launcher.start(*words, "--resume=auto")
    assert rest.popen.wait(300) == 0, rest.err
    assert f"{DAYS[0]}: training" not in rest.err
    assert f"{DAYS[1]}: training" in rest.err
    assert "the run ends before 2026-12-02: the files of 2026-12-03 are not there" in rest.err
    assert learnt(tmp_path / "days" / DAYS[2]) == learnt(tmp_path / "whole")
    days = json.loads((tmp_path / "days.json").read_text())["days"]
    assert [each["day"] for each in days] == list(DAYS[1:])
    assert days[-1]["test_auc"] == json.loads((tmp_path / "whole.json").read_text())["test_auc"]
    assert list_names(Folder(str(tmp_path / "days" / DAYS[0]))) == [], "of a day that no later one needs"
    over = launcher.start(*words, "--resume=auto")
    assert over.popen.wait(300) == 0, over.err
    assert "all days that are there were done before" in over.err


def test_a_day_that_is_still_written_is_waited_for(launcher: Launcher, tmp_path: Path, log: Path) -> None:
    for day in DAYS[:2]:
        (log / f"dt={day}" / "_SUCCESS").touch()
    path = f"{log}/dt={{day}}/*.tsv"
    section = (
        f"{{path: '{path}', first: {DAYS[0]}, last: {DAYS[1]}, marker: _SUCCESS, on_missing: wait, look_every: 0.1s}}"
    )
    run = launcher.start(*arguments([f"data.days={section}", *NO_FILES], tmp_path / "days", tmp_path / "days.json"))
    wait_until(
        lambda: f"waiting for the files of {DAYS[2]}" in run.err or run.popen.poll() is not None, "the wait", 200
    )
    assert run.popen.poll() is None, run.err
    (log / f"dt={DAYS[2]}" / "_SUCCESS").touch()
    assert run.popen.wait(300) == 0, run.err
    assert [each["day"] for each in json.loads((tmp_path / "days.json").read_text())["days"]] == list(DAYS[:2])


def test_what_is_wrong_is_refused_by_name(launcher: Launcher, tmp_path: Path, log: Path) -> None:
    url, result = tmp_path / "days", tmp_path / "days.json"
    for words, wanted in (
        (
            of_days(log, url, result, "data.days.first=2026-01-01"),
            r"data\.days\.path: .*the files of 2026-01-01 are not",
        ),
        (of_days(log, url, result, "data.days.path=/log/all"), r"lacks \{day\}, which stands for the date"),
        (of_days(log, url, result, "data.days.last=2026-11-01"), r"last: 2026-11-01 is not allowed"),
        (of_days(log, url, result, f"data.train={log}"), r"exactly one of train, stream and days is needed"),
        (of_days(log, url, result, "train.checkpoint=null"), r"data\.days: needs train\.checkpoint"),
        (
            [*of_days(log, url, result), "--resume=save-000001"],
            r"data\.days goes on where it was; allowed: auto, never",
        ),
    ):
        run = launcher.start(*words)
        assert run.popen.wait(300) == 1
        assert re.search(wanted, run.err), run.err
