"""Builds the wheel that runs where no compiler and no system package is, for ``make wheel``.

setup.py builds it of the libraries that the checkout has. auditwheel puts RocksDB, OpenSSL and the libraries that they
need inside, and finds the platform tag. torch is left out: its libraries come with the torch that is installed. Then
the wheel gets NOTICE, which has the licences of all these, and a bill of materials (CycloneDX).
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import files, version
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "wheel"
DIST = ROOT / "dist"
MOST_BYTES = 60 << 20
OF_TORCH = ("libtorch.so", "libtorch_cpu.so", "libc10.so")
# Debian packages of headers whose code is compiled in: no library of theirs is there that auditwheel could find.
COMPILED_IN = ("libasio-dev", "libxxhash-dev")


def output(*command: str | Path, check: bool = True) -> str:
    """Runs a command, with the programs of this environment first, and returns what it prints.

    Raises:
        SystemExit: the command fails, and ``check`` is set.
    """
    where = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, env={**os.environ, "PATH": where}, capture_output=True, text=True
    )
    if check and done.returncode != 0:
        raise SystemExit(f"{done.stdout}{done.stderr}sparserow: {' '.join(map(str, command[:4]))} failed")
    return done.stdout


def only(folder: Path, pattern: str) -> Path:
    """Returns the one file or folder of ``folder`` that matches."""
    (found,) = folder.glob(pattern)
    return found


def component(kind: str, name: str, number: str) -> dict[str, str]:
    """Returns a component of a bill of materials; ``kind`` is of its package URL, such as ``deb/debian``."""
    purl = f"pkg:{kind}/{name}@{quote(number, safe='')}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": number, "purl": purl}


def debian(package: str) -> dict[str, str]:
    """Returns an installed package of Debian or Ubuntu as a component."""
    number = output("dpkg-query", "-W", "-f", "${Version}", package)
    return component(f"deb/{platform.freedesktop_os_release()['ID']}", package, number)


def package_of(library: Path) -> str:
    """Returns the package of the system that has a library."""
    # Where /lib is a link to /usr/lib, dpkg knows the path that its package has, which may be either.
    names = {library.resolve(), Path("/", library.resolve().relative_to("/usr"))}
    found = [output("dpkg-query", "-S", name, check=False) for name in names]
    (package,) = {line.split(":")[0] for lines in found for line in lines.splitlines()}
    return package


def bundled(libraries: Path) -> list[dict[str, str]]:
    """Returns what is inside the wheel and not of Sparserow, by name: libraries, and headers that are compiled in.

    Args:
        libraries: the folder of the libraries that auditwheel has copied, each with a hash in its name.
    """
    linked = re.findall(r"=> (/\S+)", output("ldd", ROOT / "cpp_ext" / "libsparserow_core.so"))
    by_file = {path.resolve().name: path for path in map(Path, linked)}
    names = [re.sub(r"-[0-9a-f]{8}(?=\.so)", "", path.name) for path in libraries.iterdir()]
    packages = {*COMPILED_IN, *(package_of(by_file[name]) for name in names)}
    return [*map(debian, sorted(packages)), component("pypi", "pybind11", version("pybind11"))]


def bill_of_materials(components: list[dict[str, str]], number: str) -> dict[str, Any]:
    """Returns a bill of materials in the form of CycloneDX 1.6 for the wheel of a version."""
    own = component("pypi", "sparserow", number)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": components,
        "dependencies": [{"ref": own["bom-ref"], "dependsOn": [each["bom-ref"] for each in components]}],
    }


def licence_of(part: dict[str, str]) -> str:
    """Returns the text of a component's licence, as its package has it."""
    if part["purl"].startswith("pkg:deb/"):
        return (Path("/usr/share/doc") / part["name"] / "copyright").read_text()
    texts = [each for each in files(part["name"]) or () if each.name.startswith("LICENSE")]
    return "\n".join(each.read_text() for each in texts)


def notice(components: list[dict[str, str]]) -> str:
    """Returns the text of NOTICE: name, version and licence of each component."""
    parts = ["Sparserow is under the Apache License 2.0 (LICENSE). This wheel has inside:\n\n"]
    parts += [f"  {each['name']} {each['version']}\n" for each in components]
    for each in components:
        text = licence_of(each).strip()
        if not text:
            raise SystemExit(f"sparserow: {each['name']} has no text of its licence")
        rule = "=" * 80
        parts.append(f"\n{rule}\n{each['name']} {each['version']}\n{rule}\n\n{text}\n")
    return "".join(parts)


def main() -> None:
    """Builds the wheel into ``dist``, and prints its path and size."""
    shutil.rmtree(BUILD, ignore_errors=True)
    output(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", BUILD / "plain", ROOT)
    excluded = [f"--exclude={name}" for name in OF_TORCH]
    plain = only(BUILD / "plain", "*.whl")
    output(sys.executable, "-m", "auditwheel", "repair", "--strip", *excluded, "-w", BUILD / "repaired", plain)
    output(sys.executable, "-m", "wheel", "unpack", "-d", BUILD, only(BUILD / "repaired", "*.whl"))
    folder = only(BUILD, "sparserow-*")
    information = only(folder, "*.dist-info")
    components = bundled(folder / "sparserow.libs")
    (information / "licenses" / "NOTICE").write_text(notice(components))
    # auditwheel's own misses packages, and what is compiled in.
    shutil.rmtree(information / "sboms", ignore_errors=True)
    (information / "sboms").mkdir()
    bill = bill_of_materials(components, folder.name.removeprefix("sparserow-"))
    (information / "sboms" / "sparserow.cdx.json").write_text(json.dumps(bill, indent=1) + "\n")
    DIST.mkdir(exist_ok=True)
    for old in DIST.glob("*.whl"):
        old.unlink()
    output(sys.executable, "-m", "wheel", "pack", "-d", DIST, folder)
    wheel = only(DIST, "*.whl")
    size = wheel.stat().st_size
    print(f"{wheel.relative_to(ROOT)}: {size / (1 << 20):.1f} MiB")
    if size > MOST_BYTES:
        raise SystemExit(f"sparserow: the wheel has {size} bytes; allowed: {MOST_BYTES}")


if __name__ == "__main__":
    main()
