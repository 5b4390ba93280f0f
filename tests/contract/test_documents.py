"""Code in the documents: Python is Python, and commands have the options that they are shown with."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from doc_blocks import DocBlock, blocks_of
from doc_commands import sparserow_commands
from rooms import ROOT, line_of
from sparserow.deploy import cli

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
ROOT_OPTIONS = {"--security": 1, "--debug": 0, "--version": 0, "--help": 0}


def blocks(page: Path) -> list[DocBlock]:
    return blocks_of(page.read_text(), page.relative_to(ROOT).as_posix())


def commands() -> list[tuple[str, list[str]]]:
    """Place, and words of each call of ``sparserow``, in blocks and between backticks."""
    found = []
    for page in PAGES:
        name, text = page.relative_to(ROOT).as_posix(), page.read_text()
        texts = [(block.line, block.text) for block in blocks(page) if block.language != "python"]
        texts += [
            (line_of(text, match.start()), match[1]) for match in re.finditer(r"`([^`\n]*\bsparserow [^`\n]+)`", text)
        ]
        found += [(f"{name}:{line}", words) for line, each in texts for words in sparserow_commands(each)]
    return found


def python_blocks() -> list[DocBlock]:
    return [block for page in PAGES for block in blocks(page) if block.language == "python"]


def test_python_can_be_read() -> None:
    wrong = []
    for block in python_blocks():
        try:
            ast.parse(block.text, block.page)
        except SyntaxError as error:
            wrong.append(f"{block.page}:{block.line - 1 + (error.lineno or 1)}: {error.msg}")
    assert not wrong, "\n".join(wrong)


def fault_of(words: list[str]) -> str:
    """What is wrong with a call; nothing where it is right, or of commands in general."""
    while words and words[0] in ROOT_OPTIONS:
        words = words[1 + ROOT_OPTIONS[words[0]] :]
    if not words or not words[0].islower() or words[0] == "command":
        return ""
    if words[0] not in cli.COMMANDS:
        return f"there is no command {words[0]}"
    command: Any = cli._command(words[0])
    rest = words[1:]
    if hasattr(command, "commands"):
        if not rest or rest[0].startswith("-") or rest[0] in ("...", "…"):
            return ""
        subcommands = rest[0].split("|")
        if not set(subcommands) <= set(command.commands):
            return f"{words[0]} has no command {rest[0]}"
        command, rest = command.commands[subcommands[0]], rest[1:]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    given = {re.sub(r"[\]=].*", "", word.lstrip("[")) for word in rest if word.lstrip("[").startswith("--")}
    return f"it has no {', '.join(sorted(given - known))}" if given - known else ""


def test_a_command_has_its_options() -> None:
    faults = [(place, words, fault_of(words)) for place, words in commands()]
    wrong = [f"{place}: sparserow {' '.join(words)}: {fault}" for place, words, fault in faults if fault]
    assert not wrong, "\n".join(wrong)


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
