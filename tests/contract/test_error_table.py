"""docs/errors.md, proto/errors.py and cpp_ext/util/status.h list the same errors."""

from __future__ import annotations

import re
from pathlib import Path

from sparserow.proto import errors

ROOT = Path(__file__).resolve().parents[2]


def python_errors() -> dict[str, tuple[int, bool]]:
    return {kind.code: (kind.number, kind.retryable) for kind in errors._BY_NUMBER.values()}


def test_docs_list_every_error() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (yes|no) \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    listed = {name: (int(number), retry == "yes") for name, number, retry in rows}
    wrong = sorted(listed.items() ^ python_errors().items())
    assert not wrong, f"docs/errors.md and proto/errors.py differ in (name, (number, retryable)): {wrong}"


def test_native_codes_are_the_same() -> None:
    text = (ROOT / "cpp_ext" / "util" / "status.h").read_text()
    native = {name: int(number) for name, number in re.findall(r"^  k(\w+) = (\d+),", text, re.MULTILINE)}
    native.pop("Ok")
    wrong = sorted(native.items() ^ {name: number for name, (number, _) in python_errors().items()}.items())
    assert not wrong, f"status.h and proto/errors.py differ in (name, number): {wrong}"


def test_unknown_code_becomes_internal() -> None:
    assert isinstance(errors.error_of(999, "x"), errors.Internal)
