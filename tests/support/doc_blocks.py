"""Code blocks of README.md and of the pages in docs/."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^([ \t]*)```(\w*)[ \t]*\n(.*?)^\1```[ \t]*$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class DocBlock:
    """One block.

    Attributes:
        page: path of its page from the root of the tree.
        line: of its first line on the page, from 1.
        language: behind the fence; empty: shell commands, or what is no code.
        text: of its lines, without the indentation of a list around it.
    """

    page: str
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        """Page and first line of text, which stay when other lines come and go."""
        return f"{self.page}: {self.text.splitlines()[0]}"


def doc_blocks() -> list[DocBlock]:
    """All of them, by page and line."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [block for page in pages for block in blocks_of(page.read_text(), str(page.relative_to(ROOT)))]


def readme_first_block() -> tuple[str, str]:
    """README's first block of Python, and what it prints as the page says."""
    blocks = [block for block in doc_blocks() if block.page == "README.md"]
    at, script = next((at, block) for at, block in enumerate(blocks) if block.language == "python")
    return script.text, blocks[at + 1].text


def blocks_of(text: str, page: str) -> list[DocBlock]:
    """Blocks of one page, also those in a list."""
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 2
        body = re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE)
        found.append(DocBlock(page, line, match[2], body))
    return found
