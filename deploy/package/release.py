"""Makes a release of this checkout, for ``make release VERSION=X.Y.Z``; what is made stays on this machine.

    check -> version and changelog -> fixtures, wheel and sdist, looked at -> commit -> tag

Whatever fails, the checkout is as it was before: the commit and the tag come last, and what was written is taken back.
Publishing is a person's act; the last line says how.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from zipfile import ZipFile

from . import build_wheel
from .build_wheel import DIST
from .commands import ROOT, only, output, project_version

CHANGELOG = ROOT / "CHANGELOG.md"
# What names the version: the package, and the wheel and the images where files and documents say how to use them.
NAMING = ("pyproject.toml", "__init__.py", "README.md", "deploy/Dockerfile", "deploy/compose.yaml",
          "deploy/k8s/*/kustomization.yaml", "docs/kubernetes.md", "docs/gpu.md")  # fmt: skip
FIXTURES = "tests/fixtures"
TOOLS = Path("build", "release-tools")  # in the checkout
IN_WHEEL = ("licenses/NOTICE", "licenses/LICENSE", "sboms/sparserow.cdx.json")
_HEADING = "## [Unreleased]\n"


def problem_of(version: str, tags: Sequence[str], changed: str, changelog: str) -> str:
    """Returns why a version cannot be released; "" where it can.

    Args:
        version: as it was asked for.
        tags: of the checkout.
        changed: what ``git status --porcelain`` prints.
        changelog: the text of CHANGELOG.md.
    """
    if re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", version) is None:
        return f"VERSION: {version!r} is not allowed; allowed: X.Y.Z, three numbers"
    if changed:
        return f"the checkout has changes that are not committed:\n{changed.rstrip()}"
    released = [tag[1:] for tag in tags if re.fullmatch(r"v\d+\.\d+\.\d+", tag)]
    newest = max(released, key=_numbers, default="")
    if newest and _numbers(version) <= _numbers(newest):
        return f"VERSION: {version} is not allowed; allowed: later than {newest}, which was released"
    if "- " not in unreleased(changelog):
        return "CHANGELOG.md: [Unreleased] has no entry; allowed: one for each change that users see"
    return ""


def unreleased(changelog: str) -> str:
    """Returns what stands under [Unreleased]."""
    _, _, rest = changelog.partition(_HEADING)
    return re.split(r"^## \[", rest, maxsplit=1, flags=re.MULTILINE)[0].strip()


def released(changelog: str, version: str, day: str) -> str:
    """Returns the changelog with the entries under [Unreleased] as those of a version."""
    return changelog.replace(_HEADING, f"{_HEADING}\n## [{version}] - {day}\n", 1)


def with_version(text: str, before: str, version: str) -> str:
    """Returns a text with another version wherever it names the one before."""
    return re.sub(rf"(?<![\w.]){re.escape(before)}(?!\.?\w)", version, text)


def name_version(version: str) -> None:
    """Writes a version into each file of ``NAMING``."""
    before = project_version()
    for path in (path for pattern in NAMING for path in ROOT.glob(pattern)):
        path.write_text(with_version(path.read_text(), before, version))
    if project_version() != version:
        raise SystemExit("sparserow: pyproject.toml has no line with the project's version")


def build(version: str, torches: Sequence[str], pythons: Sequence[str]) -> list[Path]:
    """Writes the fixtures, builds wheel and sdist into ``dist`` and looks at both; returns the paths of these two."""
    output("make", "fixtures")
    build_wheel.main(torches, pythons)
    for old in DIST.glob("*.tar.gz"):
        old.unlink()
    make_sdist = f"import setuptools.build_meta as backend; backend.build_sdist({str(DIST)!r})"
    output(sys.executable, "-c", make_sdist)
    wheel, sdist = only(DIST, f"sparserow-{version}-*.whl"), only(DIST, f"sparserow-{version}.tar.gz")
    with ZipFile(wheel) as content:
        lacking = {f"sparserow-{version}.dist-info/{name}" for name in IN_WHEEL} - set(content.namelist())
    if lacking:
        raise SystemExit(f"sparserow: {wheel.name} is without {', '.join(sorted(lacking))}")
    if not (ROOT / TOOLS / "bin" / "twine").exists():
        output(sys.executable, "-m", "venv", TOOLS)
        output(TOOLS / "bin" / "pip", "install", "-q", "--disable-pip-version-check", "twine")
    print(output(TOOLS / "bin" / "twine", "check", "--strict", wheel, sdist).strip())
    print(output(sys.executable, "-m", "auditwheel", "show", wheel).strip())
    return [wheel, sdist]


def main(version: str, torches: Sequence[str] = (), pythons: Sequence[str] = ()) -> None:
    """Makes a release.

    Args:
        version: its version, such as ``0.3.0``.
        torches, pythons: what its wheel has beside what this environment needs.

    Raises:
        SystemExit: the version cannot be released, or a step failed; the checkout is as before.
    """
    changelog = CHANGELOG.read_text()
    problem = problem_of(version, output("git", "tag").split(), output("git", "status", "--porcelain"), changelog)
    if problem:
        raise SystemExit(f"sparserow: {problem}")
    before = output("git", "rev-parse", "HEAD").strip()
    try:
        name_version(version)
        CHANGELOG.write_text(released(changelog, version, f"{datetime.now(UTC):%Y-%m-%d}"))
        made = build(version, torches, pythons)
        output("git", "add", FIXTURES)
        output("git", "commit", "-q", "-a", "-m", f"release: {version}", "-m", "Made by `make release`.")
        output("git", "tag", "-a", f"v{version}", "-m", f"Sparserow {version}")
    except BaseException:
        output("git", "reset", "-q", "--hard", before)
        output("git", "clean", "-q", "-f", "-d", FIXTURES)
        print(f"sparserow: no release was made, and the checkout is at {before[:12]} as before", file=sys.stderr)
        raise
    names = " ".join(str(path.relative_to(ROOT)) for path in made)
    print(f"sparserow: {version} is committed and has the tag v{version}; nothing is published. To publish it:")
    print(f"  git push origin HEAD v{version} && {TOOLS}/bin/twine upload {names}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Makes a release of this checkout.")
    options.add_argument("version", help="X.Y.Z")
    build_wheel.add_options(options)
    main(**vars(options.parse_args()))
