"""Documents, docstrings and comments name files, tests and attributes that exist, in lines that an editor shows."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sparserow
from rooms import MAY_IMPORT, ROOT, line_of

TOPS = (*MAY_IMPORT, "tests", "docs")
PAGES = sorted([*ROOT.glob("*.md"), *(path for top in TOPS for path in (ROOT / top).rglob("*.md"))])
MODULES = [path for top in TOPS for path in sorted((ROOT / top).rglob("*.py")) if "_pb2" not in path.name]
SUFFIXES = "pyi|py|cc|h|proto|md|yaml|toml|txt|go|json"
PATH = re.compile(rf"`((?:{'|'.join(TOPS)})/[\w./*-]+\.(?:{SUFFIXES}))((?: -k \"[^\"`]+\"| -k [\w-]+)?)")
NAME = re.compile(r"`((?:sr|sparserow)(?:\.\w+)+)")


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """(first line, text) of a page, or of each docstring of a module."""
    source = path.read_text()
    if path.suffix == ".md":
        yield 1, source
    elif PATH.search(source) or NAME.search(source):  # few modules name anything, and parsing them all takes seconds
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node, clean=False)
                if text:
                    yield node.body[0].lineno, text


@functools.cache
def is_there(pattern: str) -> bool:
    return any(ROOT.glob(pattern))


@functools.cache
def sources_of(pattern: str) -> str:
    return "\n".join(path.read_text() for path in ROOT.glob(pattern))


@functools.cache
def is_known(name: str) -> bool:
    """Whether the package has an attribute of the name, files carry it as a key, or gRPC has a service of it."""
    service = re.fullmatch(r"sparserow\.v1\.(\w+)(?:\.(\w+))?", name)
    if service:
        return all(f"{word} " in sources_of("proto/*.proto") for word in service.groups() if word)
    return is_attribute(name) or is_file_key(name)


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


def test_there_are_pages_and_modules() -> None:
    assert len(PAGES) > 60
    assert len(MODULES) > 900


def test_what_is_named_exists() -> None:
    wrong = []
    for path in (*PAGES, *MODULES):
        for first, text in texts_of(path):
            missing = []
            for match in PATH.finditer(text):
                name, chosen = match.groups()
                if not is_there(name):
                    missing.append((match.start(), name))
                if any(word.lower() not in sources_of(name).lower() for word in re.findall(r"\w{4,}", chosen)):
                    missing.append((match.start(), f"{name}{chosen}"))
            missing += [(match.start(), match[1]) for match in NAME.finditer(text) if not is_known(match[1])]
            wrong += [
                f"{path.relative_to(ROOT)}:{first - 1 + line_of(text, place)}: there is no {name}"
                for place, name in missing
            ]
    assert not wrong, "\n".join(wrong)


def test_no_line_is_too_long_to_read() -> None:
    wrong = [
        f"{page.relative_to(ROOT)}:{number}: {len(line)} characters; 160 are allowed"
        for page in PAGES
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > 160 and not line.lstrip().startswith(("|", "May import: "))
    ]
    assert not wrong, "\n".join(wrong)


def test_every_promise_names_its_test() -> None:
    text, _, untested = (ROOT / "docs" / "promises.md").read_text().partition("## What is not tested")
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| promise ")]
    assert len(rows) > 25
    wrong = [row for row in rows if not re.search(r"`tests/[\w./]+\.py", row.split(" | ")[1])]
    assert not wrong, "\n".join(wrong)
    assert untested
