"""Errors and documents name what installs an optional part, by the words of one helper."""

from __future__ import annotations

import re
import subprocess
import tomllib

import pytest

from rooms import ROOT, line_of
from sparserow.deploy.preflight import installed_parts
from sparserow.proto import extras

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def test_the_command_has_the_packages_of_the_extra() -> None:
    wrong = []
    for extra, packages in EXTRAS.items():
        told, expected = extras.install_command(extra), "pip install " + " ".join(f"'{each}'" for each in packages)
        if told != expected:
            wrong.append(f"{extra}: {told}; in pyproject.toml: {expected}")
    assert EXTRAS
    assert not wrong, "\n".join(wrong)


def test_the_doctor_knows_what_each_extra_is_for() -> None:
    assert list(installed_parts.EXTRAS) == list(EXTRAS)


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
    known = {extras.install_command(extra) for extra in EXTRAS}
    wrong = []
    for name, text in texts():
        unknown = re.finditer(r"sparserow\[\w+\]", text)
        faults = [(match, "an index has no such package: use proto/extras.py") for match in unknown]
        if name.endswith(".md"):
            commands = re.finditer(r"pip install (?:'[^']+' ?)+", text)
            faults += [(each, f"allowed: {sorted(known)}") for each in commands if each[0].strip() not in known]
        elif name not in ("proto/extras.py", "deploy/examples/online_service.py"):
            spelled = re.finditer(r"pip install '(?!\{)", text)
            faults += [(match, "it spells what install_command names") for match in spelled]
        wrong += [f"{name}:{line_of(text, match.start())}: {match[0]}: {fault}" for match, fault in faults]
    assert not wrong, "\n".join(wrong)
