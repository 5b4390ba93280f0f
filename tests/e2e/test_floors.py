"""The oldest versions of the dependencies that are allowed, in an environment of their own."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from doc_blocks import readme_first_block
from other_packages import OtherPackages, pip
from rooms import ROOT

DEPENDENCIES = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
FLOORS = [each for each in DEPENDENCIES if not each.startswith("torch")]  # test_torches.py has those of torch
TESTS = ("unit/proto", "unit/ps_server", "unit/serving", "unit/worker", "unit/deploy")


@pytest.mark.full("the tests run with the versions of requirements/")
def test_the_oldest_dependencies_train_publish_and_pass_the_unit_tests(tmp_path: Path) -> None:
    environment = OtherPackages(tmp_path)
    tools = OtherPackages(tmp_path / "tools")
    pip(tools, "install", "uv")
    command = ("-m", "uv", "pip", "install", "-q", "--resolution", "lowest-direct", "--python", environment.python)
    tools.run(*command, *FLOORS)
    told = environment.run(
        "-c", "from importlib.metadata import version as v; print(v('numpy'), v('protobuf'))"
    ).split()
    for package, number in zip(("numpy", "protobuf"), told, strict=True):
        (floor,) = [each.partition(">=")[2] for each in FLOORS if re.match(rf"{package}>=", each)]
        assert number.startswith(floor)
    script, printed = readme_first_block()
    assert environment.run("-c", script) == printed
    environment.run_tests(TESTS)
