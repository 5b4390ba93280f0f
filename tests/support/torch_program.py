"""Compiles a C++ program that runs compiled torch models with the native core, without Python."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

from sparserow import cpp_ext


def build_torch_program(source: Path, program: Path, *flags: str) -> Path:
    """``program``, linked to torch, the ops and the core; ``flags`` are the compiler's."""
    native, torch_folder = Path(cpp_ext.__file__).parent, Path(torch.__file__).parent
    libraries = [f"-Wl,-rpath,{place},-L{place}" for place in (str(native), str(torch_folder / "lib"))]
    command = [
        *("g++", "-std=c++20", "-O0", str(source), "-o", str(program), f"-I{native}", *flags),
        *("-isystem", f"{torch_folder}/include", "-isystem", f"{torch_folder}/include/torch/csrc/api/include"),
        *libraries,
        *("-Wl,--no-as-needed", "-lsparserow_ops", "-lsparserow_core", "-ltorch", "-ltorch_cpu", "-lc10"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return program
