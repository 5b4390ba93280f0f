"""Builds the wheel that runs where no compiler and no system package is, for ``make wheel``.

setup.py builds it of the libraries that the checkout has; operators for other torches and bindings for other Pythons
are put beside them, and its requirements and tags name what is inside. auditwheel puts RocksDB, OpenSSL and the
libraries that they need inside, and finds the platform tag. torch is left out: its libraries come with the torch that
is installed. Then the wheel gets NOTICE, which has the licences of all these, and a bill of materials (CycloneDX).
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import files, version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .commands import ROOT, only, output
from .more_builds import build_bindings, build_operators

BUILD = ROOT / "build" / "wheel"
DIST = ROOT / "dist"
MOST_BYTES = 60 << 20
OF_TORCH = ("libtorch.so", "libtorch_cpu.so", "libc10.so")
# Debian packages of headers whose code is compiled in: no library of theirs is there that auditwheel could find.
COMPILED_IN = ("libasio-dev", "libxxhash-dev")


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


def required_torch(minors: Sequence[str]) -> str:
    """Returns the requirement of torch for minor versions of one major version, such as ``torch>=2.12,<2.15``.

    Args:
        minors: the versions, such as ``2.12``, in any order.

    Raises:
        SystemExit: they are of two major versions.
    """
    numbers = sorted(tuple(map(int, minor.split("."))) for minor in minors)
    major, first, last = numbers[0][0], numbers[0][1], numbers[-1][1]
    if numbers[-1][0] != major:
        raise SystemExit(f"sparserow: TORCHES: {', '.join(minors)} is not allowed; allowed: one major version")
    without = [number for number in range(first, last) if (major, number) not in numbers]
    return ",".join([f"torch>={major}.{first}", f"<{major}.{last + 1}", *(f"!={major}.{each}.*" for each in without)])


def name_what_is_inside(folder: Path) -> None:
    """Rewrites tags and requirements of a wheel, so that they name the Pythons and torches that it has libraries for.

    Args:
        folder: the unpacked wheel.
    """
    information, core = only(folder, "*.dist-info"), folder / "sparserow" / "cpp_ext"
    pythons = sorted(re.findall(r"_client\.cpython-(\d+)-", "\n".join(path.name for path in core.iterdir())))
    tags = "".join(f"Tag: cp{each}-cp{each}-linux_{platform.machine()}\n" for each in pythons)
    wheel = information / "WHEEL"
    wheel.write_text(re.sub(r"(?m)(^Tag: .*\n)+", tags, wheel.read_text()))
    requirement = required_torch([path.stem.partition("-")[2] for path in core.glob("libsparserow_ops-*.so")])
    metadata = information / "METADATA"
    text, count = re.subn(r"(?m)^Requires-Dist: torch[^\w-].*$", f"Requires-Dist: {requirement}", metadata.read_text())
    if count != 1:
        raise SystemExit(f"sparserow: pyproject.toml requires torch {count} times; allowed: once")
    metadata.write_text(text)


def main(torches: Sequence[str] = (), pythons: Sequence[str] = ()) -> None:
    """Builds the wheel into ``dist``, and prints its path and size.

    Args:
        torches: minor versions of torch that it has operators for, beside that of this environment.
        pythons: interpreters of Python that it has bindings for, beside this one.
    """
    more = [*map(build_operators, torches), *(library for python in pythons for library in build_bindings(python))]
    shutil.rmtree(BUILD, ignore_errors=True)
    output(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", BUILD / "plain", ROOT)
    output(sys.executable, "-m", "wheel", "unpack", "-d", BUILD / "unpacked", only(BUILD / "plain", "*.whl"))
    folder = only(BUILD / "unpacked", "sparserow-*")
    for library in more:
        shutil.copy2(library, folder / "sparserow" / "cpp_ext")
    name_what_is_inside(folder)
    (BUILD / "whole").mkdir()
    output(sys.executable, "-m", "wheel", "pack", "-d", BUILD / "whole", folder)
    excluded = [f"--exclude={name}" for name in OF_TORCH]
    whole = only(BUILD / "whole", "*.whl")
    output(sys.executable, "-m", "auditwheel", "repair", "--strip", *excluded, "-w", BUILD / "repaired", whole)
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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say what a wheel has beside what this environment needs."""
    parser.add_argument("--torches", nargs="*", default=[], help="minor versions of torch, such as 2.12")
    parser.add_argument("--pythons", nargs="*", default=[], help="interpreters of Python")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="Builds the wheel into dist.")
    add_options(options)
    main(**vars(options.parse_args()))
