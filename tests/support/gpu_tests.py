"""Runs the tests of the device floor with the Python that runs this file, for ``make test-gpu``.

It says which Python, torch, triton and device it found, which part runs on which of them, and what it skips. It
installs nothing. Parts:

- *device floor*: files of ``tests/gpu`` that import nothing of the package. They need torch, triton and pytest.
- *package*: the other files of ``tests/gpu``. They need the built package; a file that needs more than there is is
  skipped, and the end of its run names what is missing.

All tests that are marked ``gpu`` are in that folder.

``--needs-cuda`` refuses a build of torch without CUDA and a machine without a GPU, on which the kernels would run under
Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEAST_TORCH = (2, 11)
_FOUND = """
import torch
print(torch.__version__, torch.version.cuda or '-', end=' ')
print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')
"""


@dataclass(frozen=True)
class Found:
    """What there is to run tests with; "" stands for what is not there.

    Attributes:
        torch, triton, pytest: versions.
        cuda: the version of CUDA that torch was built for.
        device: the name of the first CUDA device.
        package_problem: why the package cannot be imported; "" when it can.
    """

    torch: str
    cuda: str
    device: str
    triton: str
    pytest: str
    package_problem: str


@dataclass(frozen=True)
class Part:
    """Tests that run together, or are skipped.

    Attributes:
        name: what they are.
        arguments: the arguments of pytest.
        skipped: why they are skipped; "" when they run.
    """

    name: str
    arguments: tuple[str, ...]
    skipped: str = ""


def version_of(text: str) -> tuple[int, int]:
    """The first two numbers of a version; (0, 0) of a text that has none."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def refusal(found: Found, *, needs_cuda: bool) -> str:
    """Why nothing can run; "" when something can."""
    if not found.torch:
        return f"{sys.executable} has no torch"
    if version_of(found.torch) < LEAST_TORCH:
        return f"{sys.executable} has torch {found.torch}; 2.11 or newer is needed"
    for name, version in (("triton", found.triton), ("pytest", found.pytest)):
        if not version:
            return f"{sys.executable} has no {name}"
    if needs_cuda and not found.cuda:
        return f"torch {found.torch} is a build without CUDA; TORCH_PIP tells pip where one with CUDA is"
    if needs_cuda and not found.device:
        return "there is no CUDA device; OFFLINE=1 runs the kernels under Triton's interpreter"
    return ""


def parts_of(found: Found, root: Path = ROOT) -> list[Part]:
    """The parts in the order in which they run."""
    files = sorted((root / "tests" / "gpu").glob("test_*.py"))
    uses_package = {path for path in files if re.search(r"^\s*(?:import|from) sparserow\b", path.read_text(), re.M)}
    floor = tuple(str(path.relative_to(root)) for path in files if path not in uses_package)
    package = tuple(str(path.relative_to(root)) for path in files if path in uses_package)
    problem = f"the package cannot be imported ({found.package_problem})" if found.package_problem else ""
    return [Part("device floor", floor), Part("package, on the device floor", package, problem)]


def look() -> Found:
    """What there is; torch is imported in another process, since its import may fail."""
    told = subprocess.run([sys.executable, "-c", _FOUND], capture_output=True, text=True, timeout=300)
    torch, cuda, device = [*told.stdout.strip().split(" ", 2), "", "", ""][:3]
    use = "import sparserow.cpp_ext._client"
    package = subprocess.run([sys.executable, "-c", use], capture_output=True, text=True, timeout=300, cwd="/")
    lines = package.stderr.strip().splitlines()
    problem = "" if package.returncode == 0 else (lines[-1] if lines else f"exit code {package.returncode}")
    return Found(torch, "" if cuda == "-" else cuda, device, _version("triton"), _version("pytest"), problem)


def _version(name: str) -> str:
    if importlib.util.find_spec(name) is None:
        return ""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # a copy without the files of an installation
        return "of an unknown version"


def main(arguments: list[str]) -> int:
    """Runs the parts; the exit code is 0 when all that ran passed, and something ran."""
    found = look()
    reason = refusal(found, needs_cuda="--needs-cuda" in arguments)
    if reason:
        print(f"test-gpu: {reason}; nothing ran", flush=True)
        return 1
    where = f"on {found.device}" if found.device else "under Triton's interpreter, as there is no CUDA device"
    cuda = f"for CUDA {found.cuda}" if found.cuda else "without CUDA"
    print(f"test-gpu: Python {sys.version.split()[0]} at {sys.executable}, torch {found.torch} {cuda}, ", end="")
    print(f"triton {found.triton}; kernels run {where}", flush=True)
    ends = {}
    parts = parts_of(found)
    for part in parts:
        if part.skipped:
            print(f"test-gpu: skipped: {part.name}: {part.skipped}", flush=True)
            continue
        print(f"test-gpu: runs: {part.name}: {' '.join(part.arguments)}", flush=True)
        command = ["-m", "pytest", "--rootdir", "tests", "-c", "tests/pytest.ini", "-q", "-p", "no:cacheprovider"]
        environment = {**os.environ, "SPARSEROW_TEST_SKIP_ABSENT": "1"}
        ends[part.name] = subprocess.run(
            [sys.executable, *command, *part.arguments], cwd=ROOT, env=environment
        ).returncode
    for part in parts:
        told = {0: "passed", 5: "had no test to run"}.get(ends.get(part.name, 0), "FAILED")
        print(f"test-gpu: {part.name}: {'skipped: ' + part.skipped if part.skipped else told}", flush=True)
    return int(any(code not in (0, 5) for code in ends.values()) or 0 not in ends.values())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
