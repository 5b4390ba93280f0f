"""The operators for the oldest and the newest torch that are claimed, in environments of their own."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import pytest
import torch

from checkout import link_package
from other_packages import OtherPackages, pip
from rooms import ROOT
from sparserow.deploy.package.more_builds import build_operators

REQUIREMENTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
((OLDEST, BEYOND),) = [found[0] for each in REQUIREMENTS if (found := re.findall(r"^torch>=(2\.\d+),<2\.(\d+)$", each))]
NEWEST = f"2.{int(BEYOND) - 1}"
# What the operators do alone, in layers, in compiled and exported models, and in published ones.
TESTS = ("unit/cpp_ext", "unit/worker/layers", "unit/worker/lookups", "unit/worker/publish", "unit/worker/session")


def test_the_torch_of_the_tests_is_within_the_range() -> None:
    assert int(OLDEST.split(".")[1]) <= int(torch.__version__.split(".")[1]) < int(BEYOND)


@pytest.mark.full("the tests of the operators run with one torch")
@pytest.mark.parametrize("minor", [OLDEST, NEWEST])
def test_operators_pass_their_tests_with_another_torch(tmp_path: Path, minor: str) -> None:
    environment = OtherPackages(tmp_path)
    pip(environment, "install", "--no-compile", f"torch=={minor}.*")
    core = link_package(tmp_path / "packages", left_out="libsparserow_ops-")
    operators = build_operators(minor)
    shutil.copy(operators, core)  # no link, since torch follows it and the core is looked for beside the file
    told = "import torch, sparserow; print(torch.__version__, sparserow.__file__)"
    number, package = environment.run("-c", told, path=core.parents[1]).split()
    assert number.startswith(f"{minor}.")
    assert Path(package).is_relative_to(tmp_path)
    environment.run_tests(TESTS, path=core.parents[1])
