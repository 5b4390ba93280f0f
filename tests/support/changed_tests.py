"""Runs the unit, contract and C++ tests of the folders that a change touches, for ``make check``.

``python changed_tests.py [BASE]``: the change is what differs from the commit BASE (HEAD, or the one before it where
nothing differs from HEAD), with files that git does not track yet. A test belongs to a folder when it imports a module
of it or includes a header of it, and to a change when it is part of it. The rules of ``tests/contract`` always run.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_IMPORTED = re.compile(r"^\s*(?:from|import) (sparserow[\w.]*)(?: import (.*))?", re.MULTILINE)
_INCLUDED = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


def changed_files(base: str | None) -> list[str]:
    """Paths from the root."""

    def git(*words: str) -> list[str]:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()

    untracked = git("ls-files", "--others", "--exclude-standard")
    found = git("diff", "--name-only", base or "HEAD") + untracked
    return sorted(found or git("diff", "--name-only", "HEAD~1"))


def modules_of(text: str) -> set[str]:
    """Folders whose modules a Python file imports by the package's name, with ``/``."""
    found = set()
    for module, names in _IMPORTED.findall(text):
        path = module.removeprefix("sparserow").strip(".").replace(".", "/")
        found |= {path, *(f"{path}/{name.split()[0].strip('(,')}" for name in names.split(",") if name.strip())}
    return found


def python_tests(changed: Iterable[str], tests: Iterable[Path]) -> list[str]:
    """Those of ``tests`` that belong to the change."""
    changed = [*changed]
    folders = {
        Path(name).parent.as_posix() for name in changed if name.endswith((".py", ".pyi")) and name[:6] != "tests/"
    }
    support = {Path(name).stem for name in changed if name.startswith("tests/support/")}
    chosen = []
    for path in tests:
        text = path.read_text()
        name = path.relative_to(ROOT).as_posix()
        uses = {module.rpartition("/")[0] for module in modules_of(text)} | modules_of(text)
        if (
            name in changed
            or uses & folders
            or any(re.search(rf"^(?:from|import) {stem}\b", text, re.M) for stem in support)
        ):
            chosen.append(name)
    return chosen


def cpp_tests(changed: Iterable[str], tests: Iterable[Path]) -> list[str]:
    """Names of C++ tests that belong to the change."""
    changed = [name for name in changed if name.endswith((".cc", ".h"))]
    folders = {Path(name).parent.as_posix().removeprefix("cpp_ext/") for name in changed if name.startswith("cpp_ext/")}
    fixtures = {Path(name).name for name in changed if name.startswith("tests/cpp/")}
    chosen = []
    for path in tests:
        included = {*_INCLUDED.findall(path.read_text())}
        for fixture in [each for each in included if (path.parent / each).is_file()]:
            included |= {*_INCLUDED.findall((path.parent / fixture).read_text())}
        if path.name in fixtures or included & fixtures or {name.rpartition("/")[0] for name in included} & folders:
            chosen.append(path.stem)
    return chosen


def cpp_target(names: Iterable[str]) -> list[str]:
    """The target and the variable of make that run C++ tests of these names; make reads a dollar where two stand."""
    return ["test-cpp", f"CTEST=-R '^({'|'.join(names)})$$'"]


def main(arguments: list[str]) -> int:
    """Runs them; the exit code is 0 when all passed."""
    changed = changed_files(arguments[0] if arguments else None)
    tests = ROOT / "tests"
    rules = [path.relative_to(ROOT).as_posix() for path in sorted((tests / "contract").glob("test_*.py"))]
    units = python_tests(changed, sorted((tests / "unit").rglob("test_*.py")))
    native = cpp_tests(changed, sorted((tests / "cpp").glob("*_test.cc")))
    print(f"check: {len(changed)} changed files: {len(units)} files of tests/unit, {len(native)} C++ tests", flush=True)
    others = [name for name in changed if re.match(r"tests/(?!unit|contract)\w+/test_", name)]
    if others:
        print(f"check: not run: {' '.join(others)}", flush=True)
    codes = []
    if native:
        codes.append(subprocess.run(["make", "--no-print-directory", *cpp_target(native)], cwd=ROOT).returncode)
    pytest = [sys.executable, "-m", "pytest", "--rootdir", "tests", "-c", "tests/pytest.ini", "-q", "-n", "2"]
    codes.append(subprocess.run([*pytest, "--dist", "loadfile", *rules, *units], cwd=ROOT).returncode)
    return int(any(codes))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
