"""Checks for ``sparserow doctor`` which parts an installation has, and says what mends one that is missing or wrong.

These checks work where packages, the native core or torch are missing or of another version: the error of an import is
a finding. So this file imports nothing but the standard library and modules that need no more than that.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, metadata, version
from typing import Any

from ...cpp_ext import UnsupportedError, operators_of, supported_torches
from ...proto.extras import install_command, requirements
from .finding import Finding
from .versions import installed_torch

# What each extra of pyproject.toml is for.
EXTRAS: dict[str, str] = {
    "inspect": "`sparserow inspect` of a RocksDB",
    "s3": "checkpoints, models and data at s3:// URLs",
    "ray": "clusters and training on Ray",
    "otel": "traces by OpenTelemetry",
    "foreign": "models of DeepCTR and Hugging Face, trainers of Accelerate and Lightning",
    "online": "the example of an online service by FastAPI",
    "tensorboard": "`metrics.tensorboard` of a job file",
    "report": "`sparserow report`",
    "kafka": "`data.stream.kafka` of a job file",
}
_REBUILD = "make setup in the source tree, or pip install a wheel that was built for this Python"
_IO_URING_SETUP = 425  # the number of the system call on every architecture (asm-generic/unistd.h)
_IO_URING_PARAMS_BYTES = 120  # sizeof(struct io_uring_params)


def check_parts() -> list[Finding]:
    """Returns the findings of this machine's installation, from Python to the extras."""
    build, core = native_core()
    return [
        check_python(platform.python_version()),
        check_packages([each for each in requirements() if _name_of(each) not in ("torch", "pyarrow")]),
        *(check_arrow(each) for each in requirements() if _name_of(each) == "pyarrow"),
        *core,
        check_io_uring(),
        *(check_torch(installed_torch()) if build else ()),
        *(check_extra(name, purpose) for name, purpose in EXTRAS.items()),
    ]


def check_python(found: str, allowed: str | None = None) -> Finding:
    """Checks the version of Python.

    Args:
        found: the version of Python, such as ``3.11.7``.
        allowed: the versions that the package supports, such as ``>=3.11``; None reads its metadata.
    """
    if allowed is None:
        try:
            allowed = metadata("sparserow")["Requires-Python"]
        except PackageNotFoundError:
            allowed = ""
    if _is_older(found, allowed):
        return Finding("python", "wrong", f"{found}; supported: {allowed}", f"install Python {allowed}")
    return Finding("python", "ok", f"{found}; supported: {allowed or 'not known'}")


def check_packages(needed: Sequence[str]) -> Finding:
    """Checks the packages that every process needs.

    Args:
        needed: their requirements, such as ``grpcio>=1.80``; none where the package was not installed.
    """
    if not needed:
        text = "sparserow was not installed, so that its requirements are not known"
        return Finding("packages", "warning", text, "pip install a wheel, or make setup in the source tree")
    faults = {each: fault for each in needed if (fault := _fault_of(each))}
    if faults:
        remedy = f"pip install {' '.join(map(repr, faults))}"
        return Finding("packages", "wrong", "; ".join(faults.values()), remedy)
    return Finding("packages", "ok", f"all {len(needed)} packages that every process needs are installed")


def check_arrow(needed: str) -> Finding:
    """Checks Arrow's package, which servers run without.

    Args:
        needed: its requirement, such as ``pyarrow>=18``.
    """
    fault = _fault_of(needed)
    if not fault:
        return Finding("Arrow", "ok", f"{version(_name_of(needed))}: files of data are read, and values make keys")
    text = f"{fault}: servers need none; training, predicting and lookups by values do"
    return Finding("Arrow", "absent" if fault.endswith("not installed") else "wrong", text, f"pip install '{needed}'")


def native_core() -> tuple[Mapping[str, str], list[Finding]]:
    """Returns the facts of the native core, none where it cannot be imported, and the findings of it."""
    try:
        from ...cpp_ext import _client, _server
    except ImportError as error:  # UnsupportedError is one, and so is a library that the loader does not find
        return {}, [Finding("core", "wrong", f"the native core cannot be imported: {error}", _REBUILD)]
    del _server  # another library, whose import may fail alone
    build = _client.build()
    return build, list(check_core(build))


def check_core(build: Mapping[str, str]) -> Iterator[Finding]:
    """Checks the native core and the libraries that it has.

    Args:
        build: the facts of the native core.
    """
    core = f"{platform.machine()}, {build['compiler']}, kernels for {build['kernels']} on this CPU"
    if build["kernels"] == "baseline":
        text = f"{core}: with neither AVX2 nor AVX-512 rows are updated slower, with the same bits"
        yield Finding("core", "warning", text, "choose a CPU with AVX2")
    else:
        yield Finding("core", "ok", core)
    if build["rocksdb"]:
        yield Finding("RocksDB", "ok", f"{build['rocksdb']}: --ssd-engine rocksdb is possible")
    else:
        text = "this build has none: --ssd-engine rocksdb is refused; pages, the default, does not need it"
        yield Finding("RocksDB", "absent", text, "apt install librocksdb-dev, and build anew: make clean setup")
    yield Finding("OpenSSL", "ok", f"{build['openssl']}: connections with certificates are possible")


def check_io_uring() -> Finding:
    """Checks whether the kernel allows io_uring to this process, as the SSD engine ``pages`` does."""
    libc = ctypes.CDLL(None, use_errno=True)
    file = libc.syscall(_IO_URING_SETUP, 1, ctypes.create_string_buffer(_IO_URING_PARAMS_BYTES))
    if file >= 0:
        os.close(file)
        return Finding("io_uring", "ok", "the kernel allows it: rows on an SSD are read by it")
    number = ctypes.get_errno()
    remedy = "sysctl -w kernel.io_uring_disabled=0, and allow io_uring_setup in the container's seccomp profile"
    if number == errno.ENOSYS:
        remedy = "use Linux 5.6 or newer, and allow io_uring_setup in the container's seccomp profile"
    text = f"the kernel refuses it ({os.strerror(number)}): rows on an SSD are read by threads"
    return Finding("io_uring", "absent", text, remedy)


def check_torch(found: str | None) -> Iterator[Finding]:
    """Checks that torch is one that there are operators for, that both can be imported, and CUDA.

    Args:
        found: the version of the torch that is installed; None where there is none.
    """
    torches = supported_torches()
    built_for = ", ".join(torches) or "none"
    needed = f"torch=={torches[-1]}.*" if torches else "torch"
    remedy = f"pip install '{needed}'" if torches else _REBUILD
    if found is None:
        text = f"none is installed: servers need none; training and publishing need one of {built_for}"
        yield Finding("torch", "absent", text, remedy)
        return
    try:
        operators_of(found)
        torch = import_module("torch")
        import_module("...cpp_ext.torch_ops", __package__)
    except UnsupportedError as error:
        yield Finding("torch", "wrong", str(error), remedy)
        return
    except Exception as error:  # a broken library raises ImportError, OSError or RuntimeError
        first_line = (str(error).splitlines() or [""])[0]
        text = f"{found} cannot be imported: {type(error).__name__}: {first_line}"
        yield Finding("torch", "wrong", text, f"pip install --force-reinstall '{needed}'")
        return
    yield Finding("torch", "ok", f"{found}; the operators were built for {built_for}")
    yield check_cuda(torch)


def check_cuda(torch: Any) -> Finding:
    """Checks whether torch can use CUDA.

    Args:
        torch: the module ``torch``.
    """
    if torch.version.cuda is None:
        text = "this torch was built without it: models train on the host"
        return Finding("CUDA", "absent", text, "install a build of torch for CUDA, as docs/gpu.md says")
    if not torch.cuda.is_available():
        text = f"torch was built for CUDA {torch.version.cuda}, and finds no device: models train on the host"
        return Finding("CUDA", "absent", text, "look at nvidia-smi: a driver and a device are needed")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Finding("CUDA", "ok", f"{torch.version.cuda}, {len(names)} devices: {', '.join(sorted({*names}))}")


def check_extra(name: str, purpose: str) -> Finding:
    """Checks an optional part.

    Args:
        name: its name in pyproject.toml, such as ``s3``.
        purpose: what it is for.
    """
    needed = requirements(name)
    faults = [fault for each in needed if (fault := _fault_of(each))]
    if needed and not faults:
        return Finding(f"extra {name}", "ok", purpose)
    return Finding(f"extra {name}", "absent", f"{purpose}: {'; '.join(faults) or 'not known'}", install_command(name))


def _fault_of(requirement: str) -> str:
    """Returns why a requirement is not met; empty when it is."""
    name = _name_of(requirement)
    try:
        found = version(name)
    except PackageNotFoundError:
        return f"{name} is not installed"
    return f"{name} is {found}, and {requirement} is needed" if _is_older(found, requirement) else ""


def _name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _is_older(found: str, requirement: str) -> bool:
    """Whether a version is older than the least one that a requirement names after ``>=``."""
    least = re.search(r">=\s*([\d.]+)", requirement)
    return least is not None and _numbers(found) < _numbers(least[1])


def _numbers(text: str) -> tuple[int, ...]:
    """Returns the numbers that a version begins with, without zeros at the end."""
    numbers = [int(each) for each in re.findall(r"\d+", text.partition("+")[0])]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
