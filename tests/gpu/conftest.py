"""These tests need torch, triton and pytest alone: ``pytest -c tests/pytest.ini --rootdir tests tests/gpu``.

Without a CUDA device the kernels run under Triton's interpreter, which must be chosen before triton is imported, and
needs numpy.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

DEVICE = Path(__file__).resolve().parents[2] / "cpp_ext" / "device"

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, None]:
    """With SPARSEROW_TEST_SKIP_ABSENT a file that imports a module that is not there is skipped, and names it."""
    outcome = yield
    report = outcome.get_result()
    absent = re.search(r"ModuleNotFoundError: No module named '([\w.]+)'", str(report.longrepr))
    if report.failed and absent and os.environ.get("SPARSEROW_TEST_SKIP_ABSENT"):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: there is no module {absent[1]}")


def _load(name: str, path: Path, folder: Path | None = None) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        name, path, submodule_search_locations=None if folder is None else [str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def lookup_math() -> ModuleType:
    """``cpp_ext/device/lookup_math.py``, from this checkout by its path: the package need not be built or installed."""
    if not torch.cuda.is_available():
        pytest.importorskip("numpy", reason="Triton's interpreter needs it")
    if "device_floor" not in sys.modules:
        _load("device_floor", DEVICE / "__init__.py", DEVICE)
    return importlib.import_module("device_floor.lookup_math")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def layouts(lookup_math: ModuleType) -> ModuleType:
    """``cpp_ext/device/bags.py``, likewise."""
    return importlib.import_module(f"{lookup_math.__package__}.bags")
