"""``sparserow doctor`` where parts are absent or of another version: each is a line of its table, and no traceback.

An installation is a folder of links to the packages of this environment, which a Python without ``site`` imports from.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkout import link_package

PACKAGES = Path(torch.__file__).parents[1]
MINOR = ".".join(torch.__version__.split(".")[:2])


def is_of(file: Path, package: str) -> bool:
    return file.name == package or file.name.startswith(f"{package}-")


@pytest.fixture
def installed(tmp_path: Path) -> Callable[..., Path]:
    """Makes an installation without some packages, and with some files of Sparserow left out."""

    def make(*absent: str, left_out: str = "") -> Path:
        folder = tmp_path / "installed"
        folder.mkdir()
        for each in PACKAGES.iterdir():
            if not any(is_of(each, package) for package in (*absent, "sparserow")):
                (folder / each.name).symlink_to(each)
        facts = next(each for each in PACKAGES.glob("sparserow-*.dist-info"))
        (folder / facts.name).symlink_to(facts)
        link_package(folder, left_out)
        return folder

    return make


class Outcome:
    """The end of ``sparserow doctor``: its output, its findings by area, and the areas of what is wrong."""

    def __init__(self, installation: Path, *arguments: str) -> None:
        found = installation.parent / "found.json"
        done = subprocess.run(
            [sys.executable, "-S", "-m", "sparserow.deploy.cli", "doctor", "--json", str(found), *arguments],
            env={**os.environ, "PYTHONPATH": str(installation)},
            cwd=installation.parent,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "Traceback" not in done.stderr, done.stderr
        self.out = done.stdout
        findings: list[dict[str, Any]] = json.loads(found.read_text())["findings"]
        self.areas = {each["area"]: each for each in findings}
        wrong = {each["area"] for each in findings if each["level"] == "wrong"}
        assert done.returncode == bool(wrong), self.out
        self.wrong = wrong - {"machine"}  # the limits of the machine that runs the test

    def level(self, area: str) -> str:
        return str(self.areas[area]["level"])


def test_all_that_is_there_is_ok(installed: Callable[..., Path]) -> None:
    outcome = Outcome(installed())
    assert outcome.wrong == set()
    needed = ("python", "packages", "core", "OpenSSL", "torch", "extra s3")
    assert [outcome.level(area) for area in needed] == ["ok"] * len(needed)


def test_an_extra_that_is_absent_is_not_wrong(installed: Callable[..., Path]) -> None:
    outcome = Outcome(installed("ray", "s3fs", "torch"))
    assert outcome.wrong == set()
    assert (outcome.level("extra s3"), outcome.level("extra ray")) == ("absent", "absent")
    assert outcome.areas["extra s3"]["remedy"].startswith("pip install 's3fs>=")
    assert "-> pip install 'ray[train]>=" in outcome.out  # [train] is no markup


def test_without_torch_servers_can_run_and_a_job_cannot(installed: Callable[..., Path], tmp_path: Path) -> None:
    folder = installed("torch")
    outcome = Outcome(folder)
    assert outcome.wrong == set()
    assert outcome.level("torch") == "absent"
    assert "machine" in outcome.areas
    assert outcome.areas["torch"]["remedy"] == f"pip install 'torch=={MINOR}.*'"
    assert "CUDA" not in outcome.areas
    job = tmp_path / "job.yaml"
    job.write_text("data: {train: x, test: y}\nmodel: {class: DLRM, args: {rows: {'*': 1000}}}\n")
    outcome = Outcome(folder, "--job", str(job))
    assert outcome.wrong == {"config"}
    assert "a job needs torch" in outcome.areas["config"]["text"]


def test_torch_of_another_version_is_wrong(installed: Callable[..., Path]) -> None:
    folder = installed("torch")
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("__version__ = '1.2.3'\n")
    (folder / "torch-1.2.3.dist-info").mkdir()
    (folder / "torch-1.2.3.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.2.3\n")
    outcome = Outcome(folder)
    assert outcome.wrong == {"torch"}
    assert outcome.areas["torch"]["text"] == f"torch 1.2.3 is not supported by this build; supported: {MINOR}.*"
    assert outcome.level("core") == "ok"


def test_torch_that_cannot_be_imported_is_wrong(installed: Callable[..., Path]) -> None:
    folder = installed("torch")
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("raise ImportError('libtorch.so: no such file')\n")
    facts = next(PACKAGES.glob("torch-*.dist-info"))
    (folder / facts.name).symlink_to(facts)
    outcome = Outcome(folder)
    assert outcome.wrong == {"torch"}
    assert outcome.areas["torch"]["text"].endswith("cannot be imported: ImportError: libtorch.so: no such file")


def test_a_package_that_every_process_needs_is_missed(installed: Callable[..., Path]) -> None:
    outcome = Outcome(installed("grpc", "grpcio", "torch"))
    assert outcome.wrong == {"packages"}
    assert "grpcio is not installed" in outcome.areas["packages"]["text"]
    assert outcome.areas["packages"]["remedy"].startswith("pip install 'grpcio>=")
    assert "machine" not in outcome.areas
    assert "nothing else was checked, as that needs the packages" in outcome.out


def test_a_core_that_was_not_built_for_this_python(installed: Callable[..., Path]) -> None:
    outcome = Outcome(installed(left_out="_client.cpython"))
    assert outcome.wrong == {"core"}
    assert "is not supported by this build; supported: none: run make setup" in outcome.areas["core"]["text"]
    assert "torch" not in outcome.areas
