"""The lines of ``sparserow --version``."""

from __future__ import annotations

from sparserow import __version__
from sparserow.cpp_ext import _client
from sparserow.deploy.preflight.versions import version_lines

BUILD = {"compiler": "GCC 12.2.0", "kernels": "AVX2", "rocksdb": "7.8.3", "openssl": "3.0.19"}


def test_versions_are_a_line_each() -> None:
    own, core, torch, rocksdb, openssl = version_lines(BUILD, ["2.12", "2.13"], "2.13.0+cu130")
    assert own == f"sparserow {__version__}"
    assert core.endswith(", GCC 12.2.0, kernels for AVX2 on this CPU")
    assert torch == "torch: built for 2.12, 2.13; 2.13.0+cu130 is installed"
    assert (rocksdb, openssl) == ("RocksDB: 7.8.3", "OpenSSL: 3.0.19")


def test_what_is_absent_is_named() -> None:
    _, _, torch, rocksdb, _ = version_lines(BUILD | {"rocksdb": ""}, ["2.13"], None)
    assert torch == "torch: built for 2.13; none is installed, and servers need none"
    assert rocksdb == "RocksDB: none in this build"


def test_the_core_names_what_it_was_built_with() -> None:
    build = _client.build()
    assert build.keys() == BUILD.keys()
    assert all(build[name] for name in build.keys() - {"rocksdb"})
