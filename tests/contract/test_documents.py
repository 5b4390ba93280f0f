"""Code in the documents: Python is Python, and commands have the options that they are shown with."""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sparserow.deploy import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROOT_OPTIONS = {"--security": 1, "--debug": 0, "--version": 0, "--help": 0}


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """Language and text of each code block."""
    for match in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```", page.read_text(), re.DOTALL | re.MULTILINE):
        yield match[2], textwrap.dedent(match[3])


def commands() -> list[tuple[str, str]]:
    """(page, command line) of each call of ``sparserow``, in blocks and between backticks."""
    found = []
    for page in PAGES:
        lines = [line for language, text in blocks(page) if language != "python" for line in text.splitlines()]
        lines += re.findall(r"`(sparserow [^`\n]+)`", page.read_text())
        found += [(page.name, line.strip().removeprefix("$ ")) for line in lines]
    return [(name, line) for name, line in found if line.startswith("sparserow ")]


def python_blocks() -> list[tuple[str, str]]:
    return [(page.name, text) for page in PAGES for language, text in blocks(page) if language == "python"]


@pytest.mark.parametrize(("page", "text"), python_blocks())
def test_python_can_be_read(page: str, text: str) -> None:
    ast.parse(text, page)


@pytest.mark.parametrize(("page", "line"), commands())
def test_a_command_has_its_options(page: str, line: str) -> None:
    words = shlex.split(re.split(r"\s+#|[|;>](?=\s)", line)[0].rstrip("\\…. "))[1:]
    while words and words[0] in ROOT_OPTIONS:
        words = words[1 + ROOT_OPTIONS[words[0]] :]
    if not words or not words[0].islower() or words[0] == "command":
        return  # of commands in general
    assert words[0] in cli.COMMANDS, line
    command: Any = cli._command(words[0])
    rest = words[1:]
    if hasattr(command, "commands"):
        if not rest or rest[0].startswith("-") or rest[0] in ("...", "…"):
            return
        subcommands = rest[0].split("|")
        assert set(subcommands) <= set(command.commands), line
        command, rest = command.commands[subcommands[0]], rest[1:]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    given = {re.sub(r"[\]=].*", "", word.lstrip("[")) for word in rest if word.lstrip("[").startswith("--")}
    assert given <= known, f"{page}: {line}"


def test_there_are_many_of_both() -> None:
    assert len(commands()) > 60
    assert len(python_blocks()) > 15
