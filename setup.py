"""Builds the wheel: this folder is the package ``sparserow``; CMake builds the core, and protoc the gRPC stubs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
FOLDERS = ("proto", "cpp_ext", "ps_server", "worker", "serving", "deploy")
# They and `_bench` run in a checkout alone, and a wheel is without them.
CHECKOUT_ALONE = (ROOT / "deploy" / "bench", ROOT / "deploy" / "package")


def find_packages() -> list[str]:
    """Returns every folder with an ``__init__.py`` that a wheel has, as dotted names."""
    found = ["sparserow"]
    for folder in FOLDERS:
        for init in sorted((ROOT / folder).rglob("__init__.py")):
            if not any(map(init.is_relative_to, CHECKOUT_ALONE)):
                found.append(".".join(("sparserow", *init.parent.relative_to(ROOT).parts)))
    return found


def generate_stubs(target: Path) -> None:
    """Writes ``*_pb2.py``, ``*_pb2.pyi`` and ``*_pb2_grpc.py`` for every ``proto/*.proto`` into ``target``."""
    protos = sorted((ROOT / "proto").glob("*.proto"))
    if not protos:
        return
    target.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{ROOT / 'proto'}",
            f"--python_out={target}",
            f"--pyi_out={target}",
            f"--grpc_python_out={target}",
            *map(str, protos),
        ],
        check=True,
    )
    for stub in (*target.glob("*_pb2.py"), *target.glob("*_pb2.pyi"), *target.glob("*_pb2_grpc.py")):
        text = re.sub(r"^import (\w+_pb2) as", r"from . import \1 as", stub.read_text(), flags=re.MULTILINE)
        stub.write_text(text)


class BuildPy(build_py):
    """A build step that adds the generated stubs to the package."""

    def run(self) -> None:
        if not self.editable_mode:  # because files that the tree no longer has would be packed
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        generate_stubs(ROOT / "proto" if self.editable_mode else Path(self.build_lib) / "sparserow" / "proto")


def newest(paths: list[Path]) -> float:
    """Returns the latest modification time of ``paths`` in seconds; 0 when there are none."""
    return max((path.stat().st_mtime for path in paths), default=0.0)


def is_built() -> bool:
    """Whether the libraries beside ``cpp_ext/__init__.py`` are for this torch and newer than all their sources."""
    libraries = list((ROOT / "cpp_ext").glob("*.so"))
    minor = ".".join(version("torch").split(".")[:2])
    if not (ROOT / "cpp_ext" / f"libsparserow_ops-{minor}.so").exists():
        return False
    sources = [path for path in (ROOT / "cpp_ext").rglob("*") if path.suffix in {".cc", ".h", ".txt"}]
    return min(path.stat().st_mtime for path in libraries) >= newest(sources)


class BuildNative(build_ext):
    """A build step that builds ``cpp_ext`` with CMake and Ninja, and puts the libraries beside
    ``cpp_ext/__init__.py``.
    """

    def run(self) -> None:
        if self.inplace or self.editable_mode:
            generate_stubs(ROOT / "proto")
        if not is_built():
            self.build_libraries()
        if not (self.inplace or self.editable_mode):
            target = Path(self.build_lib) / "sparserow" / "cpp_ext"
            target.mkdir(parents=True, exist_ok=True)
            for library in (ROOT / "cpp_ext").glob("*.so"):
                if not library.name.startswith("_bench."):
                    shutil.copy2(library, target)

    def build_libraries(self) -> None:
        target = ROOT / "cpp_ext"
        build = ROOT / "build" / "release"
        build.mkdir(parents=True, exist_ok=True)
        cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
        if cmake is None:
            raise SystemExit("sparserow: cmake is missing; run `make setup`, or `pip install cmake ninja`")
        configure = [
            *(cmake, "-S", str(target), "-B", str(build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"),
            "-DSPARSEROW_PYTHON=ON",
            f"-DCMAKE_MAKE_PROGRAM={Path(cmake).parent / 'ninja'}",
            f"-DPython3_EXECUTABLE={sys.executable}",
            f"-DPython_EXECUTABLE={sys.executable}",
        ]
        subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
        subprocess.run([cmake, "--build", str(build), "--parallel"], check=True)
        for operators in target.glob("libsparserow_ops-*.so"):  # those of another torch would stay, and be out of date
            operators.unlink()
        subprocess.run([cmake, "--install", str(build), "--prefix", str(target)], check=True, stdout=subprocess.DEVNULL)
        for library in target.glob("*.so"):
            os.utime(library)


setup(
    packages=find_packages(),
    package_dir={"sparserow": "."},
    ext_modules=[Extension("sparserow.cpp_ext._server", sources=[])],
    cmdclass={"build_ext": BuildNative, "build_py": BuildPy},
)
