"""``make release``: what it refuses, what it writes, and that a step that fails leaves the checkout as it was."""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from rooms import ROOT
from sparserow.deploy.package import commands, release

ENTRY = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A thing.\n\n## [0.1.0] - 2020-01-01\n\n- The first.\n"
PROJECT = '[project]\nname = "sparserow"\nversion = "0.1.0"\n\n[tool.other]\nversion = "3"\n'


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A checkout of its own, with one commit and the tag of an earlier release."""
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "CHANGELOG.md").write_text(ENTRY)
    (tmp_path / "__init__.py").write_text('__version__ = "0.1.0"\n')
    (tmp_path / "tests" / "fixtures").mkdir(parents=True)
    (tmp_path / "tests" / "fixtures" / "README.md").write_text("Of each version.\n")
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(release, "CHANGELOG", tmp_path / "CHANGELOG.md")
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "somebody@example.org")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"], ["tag", "v0.1.0"]):
        git(tmp_path, *command)
    return tmp_path


def git(where: Path, *command: str) -> str:
    return subprocess.run(["git", *command], cwd=where, check=True, capture_output=True, text=True).stdout


def state_of(checkout: Path) -> tuple[str, ...]:
    files = [(checkout / name).read_text() for name in ("pyproject.toml", "__init__.py", "CHANGELOG.md")]
    return (*files, git(checkout, "log", "--format=%s"), git(checkout, "tag"), git(checkout, "status", "--porcelain"))


@pytest.mark.parametrize("version", ["0.2", "v0.2.0", "0.2.0rc1", "00.2.0", "0.2.0 ", "-0.2.0"])
def test_a_version_has_three_numbers(version: str) -> None:
    assert release.problem_of(version, [], "", ENTRY) == (
        f"VERSION: {version!r} is not allowed; allowed: X.Y.Z, three numbers"
    )


@pytest.mark.parametrize(("version", "is_later"), [("0.9.9", False), ("0.10.0", False), ("0.10.1", True)])
def test_a_version_is_later_than_what_was_released(version: str, is_later: bool) -> None:
    said = release.problem_of(version, ["v0.9.0", "v0.10.0", "nightly"], "", ENTRY)
    assert said == (
        "" if is_later else f"VERSION: {version} is not allowed; allowed: later than 0.10.0, which was released"
    )


def test_changes_that_are_not_committed_are_named() -> None:
    assert " M README.md" in release.problem_of("0.2.0", [], " M README.md\n", ENTRY)


def test_a_changelog_without_entries_is_refused() -> None:
    bare = "# Changelog\n\n## [Unreleased]\n\n## [0.1.0] - 2020-01-01\n\n- The first.\n"
    assert "[Unreleased] has no entry" in release.problem_of("0.2.0", [], "", bare)


def test_a_release_is_a_commit_with_a_tag(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def build(version: str, *more: Sequence[str]) -> list[Path]:
        asked.extend(more)
        (checkout / "tests" / "fixtures" / version).write_text("state")
        return [checkout / "dist" / f"sparserow-{version}.tar.gz"]

    monkeypatch.setattr(release, "build", build)
    release.main("0.2.0", ["2.12", "2.14"], ["python3.12"])
    assert asked == [["2.12", "2.14"], ["python3.12"]]
    assert git(checkout, "show", "-s", "--format=%s", "v0.2.0^{commit}") == "release: 0.2.0\n"
    assert git(checkout, "status", "--porcelain") == ""
    assert "tests/fixtures/0.2.0" in git(checkout, "ls-tree", "-r", "--name-only", "v0.2.0")
    assert (checkout / "__init__.py").read_text() == '__version__ = "0.2.0"\n'
    assert (checkout / "pyproject.toml").read_text() == PROJECT.replace('"0.1.0"', '"0.2.0"')
    log = (checkout / "CHANGELOG.md").read_text()
    assert (
        log.index("## [Unreleased]") < log.index("## [0.2.0] - 2") < log.index("- A thing.") < log.index("## [0.1.0]")
    )
    assert release.unreleased(log) == ""
    assert "nothing is published" in capsys.readouterr().out


def test_the_version_is_named_wherever_files_and_documents_name_it() -> None:
    text = 'image: a-server:0.2.0\na-0.2.0-....whl v0.2.0 10.2.0 0.2.0.1 0.2.01 "0.2.0", 0.2.0.'
    made = 'image: a-server:0.3.0\na-0.3.0-....whl v0.2.0 10.2.0 0.2.0.1 0.2.01 "0.3.0", 0.3.0.'
    assert release.with_version(text, "0.2.0", "0.3.0") == made
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    listed = git(
        ROOT, "grep", "-lwF", version, "--", ":!tests", ":!CHANGELOG.md", ":!requirements", ":!docs/measurements"
    )
    named = {path.relative_to(ROOT).as_posix() for pattern in release.NAMING for path in ROOT.glob(pattern)}
    assert set(listed.split()) - named == set()


@pytest.mark.parametrize("stage", ["build", "tag"])
def test_a_step_that_fails_leaves_the_checkout_as_it_was(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    before = state_of(checkout)

    def build(version: str, torches: Sequence[str], pythons: Sequence[str]) -> list[Path]:
        (checkout / "tests" / "fixtures" / version).write_text("state")
        if stage == "build":
            raise SystemExit("sparserow: auditwheel failed")
        git(checkout, "config", "tag.gpgSign", "true")  # and there is no program that signs
        git(checkout, "config", "gpg.program", "/bin/false")
        return []

    monkeypatch.setattr(release, "build", build)
    with pytest.raises(SystemExit, match="auditwheel failed" if stage == "build" else "git tag -a v0.2.0 failed"):
        release.main("0.2.0")
    assert state_of(checkout) == before
