"""Documents, docstrings and comments name files, tests and attributes that exist, in lines that an editor shows."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import sparserow
from rooms import MAY_IMPORT, ROOT

TOPS = (*MAY_IMPORT, "tests", "docs")
PAGES = sorted([*ROOT.glob("*.md"), *(path for top in TOPS for path in (ROOT / top).rglob("*.md"))])
MODULES = [path for top in TOPS for path in sorted((ROOT / top).rglob("*.py")) if "_pb2" not in path.name]
SUFFIXES = "pyi|py|cc|h|proto|md|yaml|toml|txt|go|json"
PATH = re.compile(rf"`((?:{'|'.join(TOPS)})/[\w./*-]+\.(?:{SUFFIXES}))((?: -k \"[^\"`]+\"| -k [\w-]+)?)")
NAME = re.compile(r"`((?:sr|sparserow)(?:\.\w+)+)")


def texts_of(path: Path) -> str:
    """A page, or the docstrings of a module."""
    if path.suffix == ".md":
        return path.read_text()
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return "\n".join(
        ast.get_docstring(node) or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, nodes)
    )


@functools.cache
def sources_of(pattern: str) -> str:
    return "\n".join(path.read_text() for path in ROOT.glob(pattern))


def is_attribute(dotted: str) -> bool:
    """Whether a module, a class or the package has the name; a dataclass has its fields."""
    found: Any = sparserow
    path = "sparserow"
    for part in dotted.split(".")[1:]:
        path += f".{part}"
        if inspect.isclass(found) and part in getattr(found, "__dataclass_fields__", {}):
            return True
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = importlib.import_module(path)
            except ImportError:
                return False
    return True


def is_file_key(name: str) -> bool:
    """Whether files carry it in their metadata; of those of row parts the sources have the prefix apart."""
    rows = sources_of("proto/checkpoint/row_parts.py")
    return f'"{name}"' in sources_of("proto/**/*.py") or f'"{name.removeprefix("sparserow.")}"' in rows


def ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_there_are_pages() -> None:
    assert len(PAGES) > 60


@pytest.mark.parametrize("page", [*PAGES, *MODULES], ids=ids)
def test_what_is_named_exists(page: Path) -> None:
    text = texts_of(page)
    wrong = []
    for name, chosen in PATH.findall(text):
        if not any(ROOT.glob(name)):
            wrong.append(name)
        for word in re.findall(r"\w{4,}", chosen):
            if word.lower() not in sources_of(name).lower():
                wrong.append(f"{name}{chosen}")
    for name in NAME.findall(text):
        service = re.fullmatch(r"sparserow\.v1\.(\w+)(?:\.(\w+))?", name)
        if service:  # of gRPC
            known = all(f"{word} " in sources_of("proto/*.proto") for word in service.groups() if word)
        else:
            known = is_attribute(name) or is_file_key(name)
        if not known:
            wrong.append(name)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_no_line_is_too_long_to_read(page: Path) -> None:
    lines = [line for line in page.read_text().splitlines() if not line.lstrip().startswith(("|", "May import: "))]
    long = [line for line in lines if len(line) > 160]
    assert long == []


def test_every_promise_names_its_test() -> None:
    text, _, untested = (ROOT / "docs" / "promises.md").read_text().partition("## What is not tested")
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| promise ")]
    assert len(rows) > 25
    assert [row for row in rows if not re.search(r"`tests/[\w./]+\.py", row.split(" | ")[1])] == []
    assert untested
