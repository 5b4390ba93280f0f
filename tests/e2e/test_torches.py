"""The operators for the oldest and the newest torch that are claimed, in environments of their own."""

from __future__ import annotations

import re
import site
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
import torch

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
    environment = tmp_path / "environment"
    venv.create(environment)
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--python", python)
    subprocess.run([*pip, "install", "--no-compile", f"torch=={minor}.*"], check=True, timeout=1800)
    # The rest comes from the environment of this process, and what the new one has goes before it.
    (packages,) = site.getsitepackages()
    (own,) = environment.glob("lib/python*/site-packages")
    (own / "zz_more.pth").write_text(f"import site; site.addsitedir({packages!r})\n")
    core = tmp_path / "packages" / "sparserow" / "cpp_ext"
    core.mkdir(parents=True)
    for source, target in ((ROOT, core.parent), (ROOT / "cpp_ext", core)):
        for each in source.iterdir():
            if each.name != "cpp_ext" and not each.name.startswith((".", "build", "libsparserow_ops-")):
                (target / each.name).symlink_to(each)
    operators = build_operators(minor)
    (core / operators.name).symlink_to(operators)
    command = ["pytest", "-c", ROOT / "tests" / "pytest.ini", "--rootdir", ROOT / "tests", "-q", "-p", "no:xdist"]
    done = subprocess.run(
        [python, "-m", *map(str, command), "-p", "no:cacheprovider", *(str(ROOT / "tests" / each) for each in TESTS)],
        env={"PATH": f"{environment / 'bin'}:/usr/bin:/bin", "PYTHONPATH": str(tmp_path / "packages")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    told = subprocess.run(
        [python, "-c", "import torch, sparserow; print(torch.__version__, sparserow.__file__)"],
        env={"PYTHONPATH": str(tmp_path / "packages")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert told[0].startswith(f"{minor}.")
    assert Path(told[1]).is_relative_to(tmp_path)
