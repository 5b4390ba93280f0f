"""What the native core says on a Python or with a torch that it was not built for."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparserow import cpp_ext


def test_another_torch_is_refused_with_those_that_are_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpp_ext, "_FOLDER", tmp_path)
    with pytest.raises(cpp_ext.UnsupportedError, match=r"supported: none: run make setup$"):
        cpp_ext.operators_of("2.13.0")
    for minor in ("2.13", "2.9"):
        (tmp_path / f"libsparserow_ops-{minor}.so").touch()
    assert cpp_ext.supported_torches() == ["2.9", "2.13"]
    assert cpp_ext.operators_of("2.13.1+cu130") == tmp_path / "libsparserow_ops-2.13.so"
    assert cpp_ext.operators_of("2.9.0a0+git1") == tmp_path / "libsparserow_ops-2.9.so"
    for found in ("2.12.1", "2.14.0a0+git1", "3.13.0", "2.1.3"):
        with pytest.raises(cpp_ext.UnsupportedError) as refused:
            cpp_ext.operators_of(found)
        assert str(refused.value) == f"torch {found} is not supported by this build; supported: 2.9.*, 2.13.*"


def test_another_python_is_refused_with_those_that_are_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_ext, "EXTENSION_SUFFIXES", [".cpython-399-x86_64-linux-gnu.so"])
    for module in ("_server", "_client"):
        with pytest.raises(
            cpp_ext.UnsupportedError,
            match=r"^Python 3\.\d+ on \w+ is not supported by this build; supported: cpython-3",
        ):
            cpp_ext.__getattr__(module)
    with pytest.raises(AttributeError, match="has no attribute '_server_of_others'"):
        cpp_ext.__getattr__("_server_of_others")
