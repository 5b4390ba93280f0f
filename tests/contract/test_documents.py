"""Code in the documents: Python is Python, and commands have the options that they are shown with."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from doc_blocks import DocBlock, blocks_of
from doc_commands import sparserow_commands
from sparserow.deploy import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
ROOT_OPTIONS = {"--security": 1, "--debug": 0, "--version": 0, "--help": 0}


def blocks(page: Path) -> list[DocBlock]:
    return blocks_of(page.read_text(), page.name)


def commands() -> list[tuple[str, list[str]]]:
    """Page, and words of each call of ``sparserow``, in blocks and between backticks."""
    found = []
    for page in PAGES:
        texts = [block.text for block in blocks(page) if block.language != "python"]
        texts += re.findall(r"`([^`\n]*\bsparserow [^`\n]+)`", page.read_text())
        found += [(page.name, words) for text in texts for words in sparserow_commands(text)]
    return found


def python_blocks() -> list[tuple[str, str]]:
    return [(page.name, block.text) for page in PAGES for block in blocks(page) if block.language == "python"]


@pytest.mark.parametrize(("page", "text"), python_blocks())
def test_python_can_be_read(page: str, text: str) -> None:
    ast.parse(text, page)


@pytest.mark.parametrize(
    ("page", "words"), commands(), ids=lambda part: part if isinstance(part, str) else " ".join(part)
)
def test_a_command_has_its_options(page: str, words: list[str]) -> None:
    line = " ".join(words)
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


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("sparserow up --shards 2  # comment", ["up --shards 2"]),
        ("$ sparserow plan --rows 5 \\\n    --dim 4 \\\n    --ssd", ["plan --rows 5 --dim 4 --ssd"]),
        ("sudo sparserow ps --shard 0\nsudo -u rows sparserow top", ["ps --shard 0", "top"]),
        ("time sparserow demo; nohup /opt/bin/sparserow up &", ["demo", "up"]),
        ("OTEL_SERVICE_NAME=a B='c d' sparserow train j.yaml", ["train j.yaml"]),
        ("env A=1 timeout 5 sparserow status | grep ready && sparserow top", ["status", "top"]),
        ("torchrun --nnodes 2 --no-python sparserow train a.yaml", ["train a.yaml"]),
        ("kubectl exec pod -- sparserow status", ["status"]),
        ("for i in 0 1; do sparserow ps --shard $i; done", ["ps --shard $i"]),
        ("pip install sparserow\ncd sparserow && make", []),
    ],
)
def test_calls_are_found_wherever_they_stand(text: str, calls: list[str]) -> None:
    assert [" ".join(words) for words in sparserow_commands(text)] == calls


def test_blocks_of_a_list_are_found() -> None:
    shell = "1. Begin:\n\n   ```\n   sparserow up\n   ```\n\n"
    page = shell + "   - deeper\n     ```python\n     if a:\n         b()\n     ```\n"
    assert [(each.language, each.text, each.line) for each in blocks_of(page, "p.md")] == [
        ("", "sparserow up\n", 4),
        ("python", "if a:\n    b()\n", 9),
    ]


def test_there_are_many_of_both() -> None:
    assert len(commands()) > 60
    assert len(python_blocks()) > 15
