"""What the native core says on a Python or with a torch that it was not built for."""

from __future__ import annotations

import pytest

from sparserow import cpp_ext


def test_another_torch_is_refused_with_the_one_that_is_supported() -> None:
    cpp_ext.check_torch("2.13.1+cu130", "2.13.0+cpu")
    for found in ("2.12.1", "2.14.0a0+git1", "3.13.0"):
        with pytest.raises(cpp_ext.UnsupportedError) as refused:
            cpp_ext.check_torch(found, "2.13.0+cpu")
        assert str(refused.value) == f"torch {found} is not supported by this build; supported: 2.13.*"


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
