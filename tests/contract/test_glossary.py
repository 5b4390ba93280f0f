"""Words that were replaced (glossary.txt) do not come back."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from rooms import ROOT, line_of

GLOSSARY = Path(__file__).with_name("glossary.txt")
KINDS = {".py", ".pyi", ".cc", ".h", ".md", ".proto", ".yaml"}


def entries() -> list[tuple[list[str], re.Pattern[str], str]]:
    """(folders, what must not stand there, what stands for it)."""
    lines = [line for line in GLOSSARY.read_text().splitlines() if line and not line.startswith("# ")]
    fields = [line.split(" | ") for line in lines]
    return [(folders.split(), re.compile(word, re.MULTILINE), instead) for folders, word, instead in fields]


@functools.cache
def texts_of(folder: str) -> dict[Path, str]:
    """Path and text of each file; read once, because many words are looked for in a folder."""
    return {
        path: path.read_text()
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in KINDS and not path.stem.endswith(("_pb2", "_pb2_grpc")) and path != Path(__file__)
    }


def test_a_word_does_not_come_back() -> None:
    wrong = []
    for folders, word, instead in entries():
        texts = [(path, text) for folder in folders for path, text in texts_of(folder).items()]
        if not texts:
            wrong.append(f"{folders} have no files")
        wrong += [
            f"{path.relative_to(ROOT)}:{line_of(text, match.start())}: {match[0].strip()}; write {instead}"
            for path, text in texts
            for match in word.finditer(text)
        ]
    assert not wrong, "\n".join(wrong)


def test_a_word_is_found_where_it_stands() -> None:
    """The patterns match what they name."""
    planted = "class _Twin: pass\nhold_job()\n// Of a pull\n    # Of a shard\nHoldClock clock;\nfor (auto held = 1;"
    assert sum(bool(word.search(planted)) for _, word, _ in entries()) >= 6
