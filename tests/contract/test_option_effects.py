"""No option is accepted and ignored: each line of the table of options is refused by name where it has no effect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sparserow.deploy import cli
from sparserow.deploy.reference.option_effects import OPTION_EFFECTS, OptionEffect
from sparserow.proto.config.config import load_config
from sparserow.proto.config.job import JobConfig
from sparserow.proto.errors import InvalidArgument

BASE = ["data.train=a.tsv", "data.test=b.tsv", "model.kind=dlrm"]
LOCAL = "train.row_optimizer={kind: sgd}"  # which the local backend has, as the default


@pytest.mark.parametrize(
    "effect", [each for each in OPTION_EFFECTS if each.where == "job"], ids=lambda each: each.example[-1]
)
def test_a_key_of_a_job_is_refused_by_name(effect: OptionEffect) -> None:
    option = effect.option.removeprefix("keys of ").split()[0]
    with pytest.raises(InvalidArgument) as refused:
        load_config(JobConfig, None, [*BASE, LOCAL, *effect.example])
    told = str(refused.value)
    assert option.split(".")[-1] in told, told
    assert re.search(r"no effect|no use|needs?\b|not allowed|not possible|must be ps", told), told


@pytest.mark.parametrize(
    "effect",
    [each for each in OPTION_EFFECTS if each.where != "job"],
    ids=lambda each: " ".join((each.where, *each.example)),
)
def test_an_option_of_a_command_is_refused_by_name(
    effect: OptionEffect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("data: {train: a.tsv, test: b.tsv}\nmodel: {kind: dlrm}\n")
    words = [{"JOB": str(job), "FOLDER": str(tmp_path)}.get(word, word) for word in effect.example]
    with pytest.raises(SystemExit) as ended:
        cli.main([effect.where, *words])
    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert any(re.search(rf"{option.strip()}\b", told) for option in effect.option.replace("-", "[-_]").split(",")) or (
        any(field in told for field in ("ssd_bytes", "ssd_engine", "ssd_direct_io"))
    ), told
    assert re.search(r"no effect|needs|belong together|allowed with --hash", told), told


def test_the_table_has_each_option_once() -> None:
    lines = [(each.where, each.option, each.beside) for each in OPTION_EFFECTS]
    assert len(set(lines)) == len(lines)
    assert lines == sorted(lines, key=lambda line: (line[0] != "job", line[0]))
