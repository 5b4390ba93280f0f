"""``make test-gpu``: what it runs on, what it refuses, and what it skips with a reason."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_tests import Found, parts_of, refusal, version_of
from nested_make import outside_make

ROOT = Path(__file__).resolve().parents[2]
GOOD = Found("2.13.0+cu130", "13.0", "NVIDIA H100", "3.7.1", "9.2.0", "")


@pytest.mark.parametrize(
    ("change", "needs_cuda", "words"),
    [
        ({}, True, ""),
        ({"torch": ""}, False, "has no torch"),
        ({"torch": "2.10.1"}, False, "has torch 2.10.1; 2.11 or newer is needed"),
        ({"torch": "2.9.0"}, False, "2.11 or newer is needed"),
        ({"torch": "2.11.0"}, False, ""),
        ({"torch": "3.0.0a0+git1"}, False, ""),
        ({"triton": ""}, False, "has no triton"),
        ({"pytest": ""}, False, "has no pytest"),
        ({"cuda": "", "device": ""}, True, "is a build without CUDA; TORCH_PIP tells pip"),
        ({"cuda": "", "device": ""}, False, ""),
        ({"device": ""}, True, "there is no CUDA device; OFFLINE=1"),
    ],
)
def test_what_is_refused(change: dict[str, str], needs_cuda: bool, words: str) -> None:
    told = refusal(Found(**{**vars(GOOD), **change}), needs_cuda=needs_cuda)
    assert words in told
    assert bool(words) == bool(told)


def test_each_file_is_in_one_part_and_what_is_skipped_has_a_reason() -> None:
    floor, package = parts_of(GOOD)
    assert sorted((*floor.arguments, *package.arguments)) == sorted(
        f"tests/gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")
    )
    assert floor.arguments
    assert package.arguments
    assert [part.skipped for part in (floor, package)] == ["", ""]
    without = parts_of(Found(**{**vars(GOOD), "package_problem": "no module"}))
    assert [part.skipped for part in without] == ["", "the package cannot be imported (no module)"]


def test_what_is_marked_gpu_is_in_the_folder_that_the_target_runs() -> None:
    tests = ROOT / "tests"
    marked = {path for path in tests.rglob("*.py") if re.search(r"mark\.gpu\b", path.read_text())}
    elsewhere = sorted(path.relative_to(tests).as_posix() for path in marked if path.parent != tests / "gpu")
    assert elsewhere == []


def test_a_file_that_needs_what_is_missing_is_skipped_and_named(tmp_path: Path) -> None:
    """As where the packages of other tests are not installed."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "gpu" / "conftest.py").read_text())
    (tmp_path / "test_absent.py").write_text("import boto4\n\ndef test_it(): pass\n")
    (tmp_path / "test_there.py").write_text("def test_it(): pass\n")
    (tmp_path / "test_broken.py").write_text("from os import no_such_name\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-rs",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    environment = {**os.environ, "SPARSEROW_TEST_SKIP_ABSENT": "1"}

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *options], env=environment, capture_output=True, text=True, timeout=120)

    left = run("--ignore", str(tmp_path / "test_broken.py"))
    assert left.returncode == 0, left.stdout
    assert re.search(r"SKIPPED.*test_absent\.py.*there is no module boto4", left.stdout), left.stdout
    assert "1 passed, 1 skipped" in left.stdout
    assert run().returncode == 2, "an import that fails for another reason is an error"


def test_a_version_is_compared_by_numbers() -> None:
    assert version_of("2.9.1") < version_of("2.11.0+cpu") < version_of("10.0")
    assert version_of("unknown") == (0, 0)


def test_offline_the_device_floor_runs_without_the_package(tmp_path: Path) -> None:
    """As on a machine with torch, triton and pytest alone: importing the package fails there."""
    absent = tmp_path / "sparserow"
    absent.mkdir()
    (absent / "__init__.py").write_text("raise ImportError('it is not installed here')\n")
    run = subprocess.run(
        ["make", "--no-print-directory", "test-gpu", "OFFLINE=1", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        env={**outside_make(), "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"^test-gpu: Python 3\.\S+ at \S+, torch \S+ .*, triton \S+; kernels run under", run.stdout)
    assert re.search(r"^test-gpu: runs: device floor: tests/gpu/test_lookup_kernels\.py", run.stdout, re.MULTILINE)
    assert re.search(r"^\d+ passed", run.stdout, re.MULTILINE)
    skipped = re.findall(r"^test-gpu: skipped: (.*)$", run.stdout, re.MULTILINE)
    assert len(skipped) == 1
    assert "ImportError: it is not installed here" in skipped[0]
    assert "test-gpu: device floor: passed" in run.stdout


def test_a_build_without_cuda_is_refused_before_the_package_is_built(tmp_path: Path) -> None:
    torch = tmp_path / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("class version:\n    cuda = None\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    pips = tmp_path / "pips"
    pip = tmp_path / "pip"
    pip.write_text(f'#!/bin/sh\necho "$@" >> {pips}\n')
    pip.chmod(0o755)
    run = subprocess.run(
        [
            "make",
            "--no-print-directory",
            "-o",
            "build/.stamp-apt",
            "test-gpu",
            f"GPU_VENV={tmp_path}",
            f"GPU_PIP={pip}",
            "TORCH_PIP=--pre",
        ],
        cwd=ROOT,
        env={**outside_make(), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode != 0
    assert "torch was installed without CUDA; name where pip finds a build with CUDA: TORCH_PIP=" in run.stdout
    assert re.fullmatch(r"--pre torch==\S+\n", pips.read_text()), "nothing more was installed"
