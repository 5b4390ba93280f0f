"""Errors and documents name what installs an optional part, by the words of one helper."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import tomllib

from sparserow.proto import extras

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


@pytest.mark.parametrize("extra", EXTRAS)
def test_the_command_has_the_packages_of_the_extra(extra: str) -> None:
    assert extras.install_command(extra) == "pip install " + " ".join(f"'{package}'" for package in EXTRAS[extra])


def test_a_tree_that_was_not_installed_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise extras.PackageNotFoundError(name)

    monkeypatch.setattr(extras, "requires", requires)
    assert extras.install_command("ray") == "pip install '.[ray]' in sparserow's source tree"


def texts() -> list[tuple[str, str]]:
    """Each file of the tree that a user reads, or that has words for one."""
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    found = [
        name for name in names.stdout.splitlines() if name.endswith((".py", ".md", ".yaml")) and name[:6] != "tests/"
    ]
    assert len(found) > 200
    return [(name, (ROOT / name).read_text()) for name in found if (ROOT / name).exists()]


def test_no_other_wording_is_left() -> None:
    wrong = [name for name, text in texts() if re.search(r"sparserow\[\w+\]", text)]
    assert wrong == [], "an index has no such package: use proto/extras.py"
    known = {extras.install_command(extra) for extra in EXTRAS}
    for name, text in texts():
        if name.endswith(".md"):
            for command in re.findall(r"pip install (?:'[^']+' ?)+", text):
                assert command.strip() in known, f"{name}: {command}; allowed: {sorted(known)}"
        elif name != "proto/extras.py" and name != "deploy/examples/online_service.py":
            assert not re.search(r"pip install '(?!\{)", text), f"{name} spells what install_command names"
