"""What all tests share: ``tests/support`` is importable, processes are cleaned up."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))

# Triton decides at its import whether kernels are interpreted, and compilers import it too: before all of them.
if not Path("/proc/driver/nvidia").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# Several tests run at once: threads that wait for each other's turn by spinning, as OpenMP's do, would take the CPUs
# from whoever has work. Processes of tests inherit it. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A run in the background of a script inherits that SIGINT is ignored, and so would each program that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import forked_programs
from long_form import FULL

if TYPE_CHECKING:
    from sparserow_process import Launcher

forked_programs.install()

# Files that take minutes and would come late. Tests of a file stay on one CPU, so one that began last would run alone.
FIRST = ("e2e/test_counted_device.py", "unit/cpp_ext/test_gather_all.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the tests of ``FIRST`` before the others, and skips what the long form alone has."""
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))
    for item in items:
        if FULL and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1800))  # its rounds and kills are many times as many
        mark = item.get_closest_marker("full")
        if mark is not None and not FULL:
            item.add_marker(pytest.mark.skip(reason="; ".join(("the long form: make test-full", *mark.args))))


def pytest_unconfigure() -> None:
    """Ends what programs were forked from."""
    forked_programs.end()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, None, None]:
    """A test that is marked ``started``, and its fixtures, fork no program."""
    with forked_programs.as_started() if item.get_closest_marker("started") else contextlib.nullcontext():
        yield


@pytest.fixture(params=["pages", "rocksdb"])
def ssd_engine(request: pytest.FixtureRequest) -> str:
    """Each engine of the SSD tier; a build without RocksDB skips the second."""
    from sparserow.cpp_ext import _server

    if request.param == "rocksdb" and not _server.has_rocksdb():
        pytest.skip("this build has no RocksDB")
    return str(request.param)


@pytest.fixture(params=["pages", "pages by direct I/O", "rocksdb"])
def ssd_options(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The options of a store or a cluster for each way to keep rows on an SSD; one that is not to be had is skipped."""
    from sparserow.cpp_ext import _server

    engine, is_direct = str(request.param).split()[0], "direct" in request.param
    if engine == "rocksdb" and not _server.has_rocksdb():
        pytest.skip("this build has no RocksDB")
    if is_direct:
        probe = tmp_path / "probe"
        try:
            os.close(os.open(probe, os.O_CREAT | os.O_RDWR | os.O_DIRECT))
        except OSError:
            pytest.skip(f"the file system of {tmp_path} has no direct I/O")
        finally:
            probe.unlink(missing_ok=True)
    return {"ssd_engine": engine, "ssd_direct_io": is_direct}


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    """Starts ``sparserow`` processes; those a test leaves running are stopped."""
    from sparserow_process import Launcher  # tests/gpu runs where what it needs is missing

    made = Launcher(tmp_path)
    yield made
    made.kill_all()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """A test that fails says what its processes said: their files are gone by the time that somebody looks."""
    outcome = yield
    report = outcome.get_result()
    launcher = getattr(item, "funcargs", {}).get("launcher")
    if report.when == "call" and report.failed and launcher is not None:
        report.sections.extend(launcher.last_words())
