"""No option is accepted and ignored: each line of the table of options is refused by name where it has no effect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sparserow.deploy import cli
from sparserow.deploy.reference.command_rules import COMMAND_RULES
from sparserow.proto.config.job import JobConfig
from sparserow.proto.config.rules import RULES
from sparserow.proto.errors import InvalidArgument
from sparserow.proto.options.document import load_config

BASE = ["data.train=a.tsv", "data.test=b.tsv", "model={class: DLRM, args: {rows: {'*': 1000000}}}"]
LOCAL = "train.row_optimizer={kind: sgd}"  # which the local backend has, as the default


def test_a_key_of_a_job_is_refused_by_name() -> None:
    assert len(RULES) > 60
    wrong = []
    for effect in RULES:
        option = effect.option.removeprefix("keys of ").split()[0]
        try:
            load_config(JobConfig, None, [*BASE, LOCAL, *effect.example])
            told = "it is accepted"
        except InvalidArgument as error:
            told = str(error)
        is_named = option.split(".")[-1] in told
        if effect.is_broken is not None:
            is_named &= effect.needs.removeprefix("no ") in told and effect.because in told
        if not is_named or not re.search(r"no effect|no use|needs?\b|not allowed|not possible", told):
            wrong.append(f"{effect.option} without {effect.needs}: {told}")
    assert not wrong, "\n".join(wrong)


def test_an_option_of_a_command_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(COMMAND_RULES) > 20
    wrong = []
    for number, effect in enumerate(COMMAND_RULES):
        folder = tmp_path / str(number)
        folder.mkdir()
        job = folder / "job.yaml"
        job.write_text("data: {train: a.tsv, test: b.tsv}\nmodel: {class: DLRM, args: {rows: {'*': 1000000}}}\n")
        words = [{"JOB": str(job), "FOLDER": str(folder)}.get(word, word) for word in effect.example]
        code: object = 0
        try:
            cli.main([effect.where, *words])
        except SystemExit as ended:
            code = ended.code
        except Exception as error:  # of any kind: each option is told that is not refused
            code = repr(error)
        told = capsys.readouterr().err
        is_named = any(
            re.search(rf"{option.strip()}\b", told) for option in effect.option.replace("-", "[-_]").split(",")
        ) or any(field in told for field in ("ssd_bytes", "ssd_engine", "ssd_direct_io"))
        has_reason = re.search(r"no effect|needs|belong together|allowed with --hash", told)
        if code != 1 or not is_named or not has_reason:
            wrong.append(f"{effect.where} {effect.option} without {effect.needs}: code {code}: {told}")
    assert not wrong, "\n".join(wrong)


def test_the_table_has_each_option_once() -> None:
    lines = [(each.where, each.option, each.needs) for each in (*RULES, *COMMAND_RULES)]
    assert len(set(lines)) == len(lines)
    assert lines == sorted(lines, key=lambda line: (line[0] != "job", line[0]))
