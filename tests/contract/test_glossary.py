"""Words that were replaced (glossary.txt) do not come back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rooms import ROOT

GLOSSARY = Path(__file__).with_name("glossary.txt")
KINDS = {".py", ".pyi", ".cc", ".h", ".md", ".proto", ".yaml"}


def entries() -> list[tuple[list[str], re.Pattern[str], str]]:
    """(folders, what must not stand there, what stands for it)."""
    lines = [line for line in GLOSSARY.read_text().splitlines() if line and not line.startswith("# ")]
    fields = [line.split(" | ") for line in lines]
    return [(folders.split(), re.compile(word, re.MULTILINE), instead) for folders, word, instead in fields]


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry[1].pattern)
def test_a_word_does_not_come_back(entry: tuple[list[str], re.Pattern[str], str]) -> None:
    folders, word, instead = entry
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*")) if path.suffix in KINDS]
    assert paths, f"{folders} have no files"
    found = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}"
        for path in paths
        if not path.stem.endswith(("_pb2", "_pb2_grpc")) and path != Path(__file__)
        for text in [path.read_text()]
        for match in word.finditer(text)
    ]
    assert not found, f"write {instead} in place of {word.pattern}: {found[:10]}"


def test_a_word_is_found_where_it_stands() -> None:
    """The patterns match what they name."""
    planted = "class _Twin: pass\nhold_job()\n// Of a pull\n    # Of a shard\nHoldClock clock;\nfor (auto held = 1;"
    assert sum(bool(word.search(planted)) for _, word, _ in entries()) >= 6
