"""The parts of an installation as ``sparserow doctor`` finds them."""

from __future__ import annotations

import errno
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparserow import cpp_ext
from sparserow.cpp_ext import _client
from sparserow.deploy.preflight import installed_parts
from sparserow.deploy.preflight.finding import Finding
from sparserow.deploy.preflight.installed_parts import (
    check_arrow,
    check_core,
    check_cuda,
    check_extra,
    check_io_uring,
    check_packages,
    check_parts,
    check_python,
    check_torch,
)
from sparserow.proto import extras

BUILD = {"compiler": "GCC 12.2.0", "kernels": "AVX2", "rocksdb": "7.8.3", "openssl": "3.0.19"}


def test_what_is_not_ok_has_a_remedy() -> None:
    """The tests are not run where a part that is needed is wrong."""
    findings = check_parts()
    assert not [each for each in findings if each.level == "wrong"]
    assert all(bool(each.remedy) == (each.level != "ok") for each in findings)
    assert len({each.area for each in findings}) == len(findings)


@pytest.mark.parametrize(
    ("found", "allowed", "level"),
    [
        ("3.11.0", ">=3.11", "ok"),
        ("3.9.18", ">=3.11", "wrong"),
        ("3.12.0rc1", ">=3.11", "ok"),
        ("3.11.0", ">=3.11.0", "ok"),
        ("4.0", ">=3.11", "ok"),
        ("3.11.0", "", "ok"),
    ],
)
def test_the_version_of_python(found: str, allowed: str, level: str) -> None:
    assert check_python(found, allowed).level == level


def test_the_supported_python_is_that_of_the_package() -> None:
    assert check_python("3.10.2") == Finding("python", "wrong", "3.10.2; supported: >=3.11", "install Python >=3.11")


def test_packages_that_are_absent_or_too_old() -> None:
    assert check_packages(["pytest>=1"]).level == "ok"
    finding = check_packages(["pytest>=1", "no-such-package>=2", "pyyaml>=999.1"])
    assert finding.level == "wrong"
    assert finding.text == (
        f"no-such-package is not installed; pyyaml is {version('pyyaml')}, and pyyaml>=999.1 is needed"
    )
    assert finding.remedy == "pip install 'no-such-package>=2' 'pyyaml>=999.1'"


def test_arrow_may_be_absent_and_not_too_old() -> None:
    assert check_arrow("pyarrow>=1").level == "ok"
    assert check_arrow("pyarrow>=999").level == "wrong"
    finding = check_arrow("no-such-arrow>=18")
    assert (finding.level, finding.remedy) == ("absent", "pip install 'no-such-arrow>=18'")


def test_a_tree_that_was_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise extras.PackageNotFoundError(name)

    monkeypatch.setattr(extras, "requires", absent)
    monkeypatch.setattr(installed_parts, "metadata", absent)
    levels = {each.area: each.level for each in check_parts()}
    assert (levels["packages"], levels["python"], levels["extra s3"]) == ("warning", "ok", "absent")


def test_the_core_and_its_libraries() -> None:
    assert [(each.area, each.level) for each in check_core(BUILD)] == [
        ("core", "ok"),
        ("RocksDB", "ok"),
        ("OpenSSL", "ok"),
    ]
    core, rocksdb, _ = check_core(BUILD | {"rocksdb": "", "kernels": "baseline"})
    assert (core.level, core.remedy) == ("warning", "choose a CPU with AVX2")
    assert rocksdb.level == "absent"
    assert "--ssd-engine rocksdb is refused" in rocksdb.text


def test_a_build_without_rocksdb_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_client, "build", lambda: BUILD | {"rocksdb": ""})
    assert {each.area: each.level for each in check_parts()}["RocksDB"] == "absent"


@pytest.mark.parametrize(
    ("number", "words"), [(errno.EPERM, "kernel.io_uring_disabled=0"), (errno.ENOSYS, "Linux 5.6 or newer")]
)
def test_a_kernel_that_refuses_io_uring(number: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    libc = SimpleNamespace(syscall=lambda *_: -1)
    monkeypatch.setattr(
        installed_parts,
        "ctypes",
        SimpleNamespace(CDLL=lambda *_, **__: libc, get_errno=lambda: number, create_string_buffer=bytes),
    )
    finding = check_io_uring()
    assert finding.level == "absent"
    assert "read by threads" in finding.text
    assert words in finding.remedy


def test_io_uring_is_found_as_the_core_finds_it() -> None:
    from sparserow.cpp_ext import _bench

    assert (check_io_uring().level == "ok") == _bench.has_io_uring()


@pytest.fixture
def built_for_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build with operators for two torches."""
    monkeypatch.setattr(cpp_ext, "_FOLDER", tmp_path)
    for minor in ("2.12", "2.13"):
        (tmp_path / f"libsparserow_ops-{minor}.so").touch()


@pytest.mark.usefixtures("built_for_two")
def test_torch_of_another_version_and_none() -> None:
    (finding,) = check_torch("2.14.0+cpu")
    assert finding.level == "wrong"
    assert finding.text == "torch 2.14.0+cpu is not supported by this build; supported: 2.12.*, 2.13.*"
    assert finding.remedy == "pip install 'torch==2.13.*'"
    (finding,) = check_torch(None)
    assert (finding.level, finding.remedy) == ("absent", "pip install 'torch==2.13.*'")
    assert finding.text.endswith("need one of 2.12, 2.13")


def test_a_build_without_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_ext, "_FOLDER", tmp_path)
    for found, level in ((None, "absent"), ("2.13.0", "wrong")):
        (finding,) = check_torch(found)
        assert (finding.level, finding.remedy[:10]) == (level, "make setup")


@pytest.mark.usefixtures("built_for_two")
def test_a_torch_whose_library_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise OSError(f"libcudart.so.12: cannot open shared object file\nof {name}")

    monkeypatch.setattr(installed_parts, "import_module", fail)
    (finding,) = check_torch("2.13.0")
    assert finding.text == "2.13.0 cannot be imported: OSError: libcudart.so.12: cannot open shared object file"
    assert finding.remedy == "pip install --force-reinstall 'torch==2.13.*'"


def test_cuda() -> None:
    def torch(build: str | None, devices: int) -> Any:
        cuda = SimpleNamespace(
            is_available=lambda: devices > 0, device_count=lambda: devices, get_device_name=lambda _: "NVIDIA H200"
        )
        return SimpleNamespace(version=SimpleNamespace(cuda=build), cuda=cuda)

    assert "built without it" in check_cuda(torch(None, 0)).text
    assert "finds no device" in check_cuda(torch("12.8", 0)).text
    assert check_cuda(torch("12.8", 2)) == Finding("CUDA", "ok", "12.8, 2 devices: NVIDIA H200")


def test_an_extra_that_is_absent_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        extras, "requires", lambda _: ['no-such[x]>=1; extra == "s3"', 'pyyaml>=999; extra == "report"']
    )
    finding = check_extra("s3", "URLs")
    assert finding == Finding("extra s3", "absent", "URLs: no-such is not installed", "pip install 'no-such[x]>=1'")
    assert check_extra("report", "reports").level == "absent"
