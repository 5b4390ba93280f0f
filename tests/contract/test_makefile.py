"""The Makefile's recipes: on machines that differ from the developers', and when a part of the tests fails."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from changed_tests import cpp_target, cpp_tests, python_tests
from nested_make import outside_make

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("variable", ["PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"])
def test_processes_store_the_modules_that_they_compile(variable: str) -> None:
    """Packages come uncompiled, so each process would compile torch again where its work is not stored beside it."""
    command = ("make", "--no-print-directory", "--eval=environment: ; @env", "environment")
    made = subprocess.run(
        command, cwd=ROOT, env=outside_make() | {variable: "1"}, capture_output=True, text=True, timeout=60, check=True
    )
    names = {line.partition("=")[0] for line in made.stdout.splitlines()}
    assert "PATH" in names
    assert variable not in names


@pytest.mark.parametrize("bad", ["lint", "test-cpp", "test-py", ""])
def test_each_part_runs_and_what_failed_is_said_at_once_and_at_the_end(tmp_path: Path, bad: str) -> None:
    make, called = tmp_path / "make", tmp_path / "called"
    make.write_text(f'#!/bin/sh\necho "$2" >> {called}\necho "$2 ran"\ntest "$2" != "{bad}"\n')
    make.chmod(0o755)
    command = ["make", "--no-print-directory", "-o", "setup", "test", f"MAKE={make}", f"FAILED={tmp_path / 'failed'}"]
    done = subprocess.run(command, cwd=ROOT, env=outside_make(), capture_output=True, text=True, timeout=60)
    assert sorted(called.read_text().split()) == ["lint", "test-cpp", "test-py"]
    lines = done.stdout.splitlines()
    if not bad:
        assert (done.returncode, len(lines)) == (0, 3)
        return
    assert done.returncode == 2
    assert f"sparserow: {bad} FAILED" in lines
    if bad != "test-py":
        assert lines.index(f"sparserow: {bad} FAILED") < lines.index("test-py ran")
    assert lines[-1] == f"sparserow: failed: {bad}"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "tests/README.md", ".github/workflows/test.yml"])
def test_targets_that_a_page_names_exist(page: str) -> None:
    named = set(re.findall(r"\bmake (?:-s )?([a-z]+(?:-[a-z]+)*)", _commands(page)))
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert named
    assert named - {*phony[1].split()} == set()


def _commands(page: str) -> str:
    """What stands in blocks and between backticks; of a workflow all."""
    text = (ROOT / page).read_text()
    return text if page.endswith(".yml") else "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))


def test_a_workflow_installs_what_setup_asks_for() -> None:
    command = ["make", "--no-print-directory", "-s", "packages"]
    done = subprocess.run(command, cwd=ROOT, env=outside_make(), capture_output=True, text=True, timeout=60, check=True)
    assert {"g++", "librocksdb-dev", "etcd-server"} <= {*done.stdout.split()}
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    steps = workflow["jobs"]["test"]["steps"]
    assert [step["run"] for step in steps if "run" in step][-1] == "make test"
    assert steps[0]["with"]["path"] == "sparserow"


def pins(name: str) -> dict[str, int]:
    """The packages of a file of requirements, each with the number of its hashes."""
    found: dict[str, int] = {}
    for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines():
        if pin := re.match(r"([a-z0-9-]+)==\S+", line):
            found[package := pin[1]] = 0
        elif not line.startswith("#"):
            assert "--hash=sha256:" in line
            found[package] += 1
    return found


def test_packages_are_pinned_with_hashes_and_the_demo_installs_no_package_of_tests() -> None:
    run, test, docs = (pins(name) for name in ("run", "test", "docs"))
    assert all(count > 0 for each in (run, test, docs) for count in each.values())
    assert {"pytest", "auditwheel", "pandas", "ray"} <= test.keys()
    assert not run.keys() & test.keys()
    assert "torch" not in run.keys() | test.keys() | docs.keys(), "the Makefile's TORCH names it"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    names = {re.split(r"[^\w-]", each.replace("_", "-"))[0] for each in asked}
    assert names - run.keys() == {"torch"}
    command = ["make", "--no-print-directory", "-n", "-B", "demo"]
    done = subprocess.run(command, cwd=ROOT, env=outside_make(), capture_output=True, text=True, timeout=60, check=True)
    assert "requirements/run.txt" in done.stdout
    assert "requirements/test.txt" not in done.stdout


def test_a_check_chooses_the_tests_of_the_folders_that_a_change_touches() -> None:
    units, native = sorted((ROOT / "tests/unit").rglob("test_*.py")), sorted((ROOT / "tests/cpp").glob("*_test.cc"))
    chosen = python_tests(["serving/replica_map.py", "docs/serving.md"], units)
    assert "tests/unit/serving/test_failed_loads.py" in chosen
    assert "tests/unit/worker/metrics/test_losses.py" not in chosen
    assert python_tests(["tests/unit/worker/metrics/test_losses.py"], units) == [
        "tests/unit/worker/metrics/test_losses.py"
    ]
    assert python_tests(["README.md"], units) == []
    chosen = cpp_tests(["cpp_ext/commit/commit_log.cc"], native)
    assert {"commit_log_test", "commit_log_cut_test"} <= {*chosen}
    assert "crc32c_test" not in chosen
    assert "server_client_test" in cpp_tests(["tests/cpp/rpc_fixture.h"], native)
    assert cpp_tests(["worker/session/session.py"], native) == []
    command = ["make", "--no-print-directory", "-n", "-o", "setup", *cpp_target(["hash_test", "store_test"])]
    done = subprocess.run(command, cwd=ROOT, env=outside_make(), capture_output=True, text=True, timeout=60, check=True)
    assert "ctest --parallel 2 --output-on-failure -R '^(hash_test|store_test)$'" in done.stdout
