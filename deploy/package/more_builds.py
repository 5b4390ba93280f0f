"""Builds what a wheel has beside the checkout's own: operators for other torches, and bindings for other Pythons.

All link the core that the checkout has built, which needs neither.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

from .commands import ROOT, only, output

BUILD = ROOT / "build"

# The operators are compiled with these files of a wheel of torch, and linked against its libraries.
_OF_TORCH = re.compile(r"torch/(include/.*|version\.py|lib/lib(torch|torch_cpu|c10)\.so)")


def torch_folder(minor: str) -> Path:
    """Returns the folder of a torch with its headers, which stays in ``build``; pip finds its wheel.

    Args:
        minor: the minor version, such as ``2.12``.

    Raises:
        SystemExit: the version is not of this form, or pip finds no such torch.
    """
    if re.fullmatch(r"\d+\.\d+", minor) is None:
        raise SystemExit(f"sparserow: TORCHES: {minor!r} is not allowed; allowed: minor versions, such as 2.12")
    folder = BUILD / "torches" / minor
    if not (folder / "torch" / "version.py").exists():
        shutil.rmtree(folder, ignore_errors=True)
        pip = (sys.executable, "-m", "pip", "-q", "download", "--no-deps", "--only-binary=:all:")
        output(*pip, "-d", folder, f"torch=={minor}.*")
        with ZipFile(only(folder, "*.whl")) as wheel:
            names = [name for name in wheel.namelist() if _OF_TORCH.fullmatch(name)]
            names.sort(key=lambda name: name.endswith("version.py"))  # the last: what is half there is not taken
            wheel.extractall(folder, names)
        only(folder, "*.whl").unlink()
    return folder / "torch"


def build_operators(minor: str) -> Path:
    """Returns the library of the operators for a torch.

    Args:
        minor: the minor version, such as ``2.12``.
    """
    folder = _build(BUILD / f"operators-{minor}", Path(sys.executable), torch_folder(minor), ("sparserow_ops",))
    return only(folder, "libsparserow_ops-*.so")


def build_bindings(python: str) -> list[Path]:
    """Returns the extension modules for another Python.

    Args:
        python: its interpreter, whose headers are installed: a path, or a name that PATH has.

    Raises:
        SystemExit: there is no such interpreter, or it has no headers.
    """
    found = shutil.which(python)
    if found is None:
        raise SystemExit(f"sparserow: PYTHONS: {python!r} is not allowed; allowed: interpreters of Python")
    suffix = output(found, "-c", "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))").strip()
    (own,) = find_spec("torch").submodule_search_locations  # type: ignore[union-attr, misc]
    folder = _build(BUILD / f"bindings{suffix.removesuffix('.so')}", Path(found), Path(own), ("_client", "_server"))
    return [folder / f"{name}{suffix}" for name in ("_client", "_server")]


def _build(folder: Path, python: Path, torch: Path, targets: Sequence[str]) -> Path:
    pybind = output(sys.executable, "-m", "pybind11", "--cmakedir").strip()
    core = ROOT / "cpp_ext" / "libsparserow_core.so"
    output(
        *("cmake", "-S", ROOT / "cpp_ext", "-B", folder, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"),
        "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",  # the core is beside them in the wheel, and not where it is linked
        *(f"-DSPARSEROW_CORE={core}", f"-DSPARSEROW_TORCH={torch}", f"-Dpybind11_DIR={pybind}"),
        *(f"-DPython3_EXECUTABLE={python}", f"-DPython_EXECUTABLE={python}"),
    )
    output("cmake", "--build", folder, "--parallel", "--target", *targets)
    return folder
