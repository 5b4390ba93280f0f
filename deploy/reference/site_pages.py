"""Makes the pages of the documentation site that are not in ``docs/``: README, ARCHITECTURE.md and the public names.

MkDocs calls the ``on_...`` functions (``hooks`` of mkdocs.yml) when ``make docs`` runs it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the generated pages to the pages of ``docs/``."""
    from mkdocs.structure.files import File  # type: ignore[import-not-found]

    pages = {
        "index.md": site_links((ROOT / "README.md").read_text(), ROOT),
        "architecture.md": site_links((ROOT / "ARCHITECTURE.md").read_text(), ROOT),
        "api.md": api_page((ROOT / "__init__.pyi").read_text()),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns a page of ``docs/`` in which links to source files are plain names."""
    path = ROOT / "docs" / page.file.src_uri
    return site_links(markdown, path.parent) if path.exists() else markdown


def site_links(text: str, folder: Path) -> str:
    """Returns Markdown whose links to pages outside of ``docs/`` lead to their place in the site, or are plain names.

    Args:
        text: the Markdown.
        folder: the folder that relative links start from.
    """
    docs = ROOT / "docs"
    moved = {ROOT / "README.md": "index.md", ROOT / "ARCHITECTURE.md": "architecture.md"}

    def link(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        there = (folder / target).resolve()
        if there in moved:
            return f"[{label}]({moved[there]}{anchor})"
        if there.is_relative_to(docs) and there.is_file():
            inside = folder.is_relative_to(docs)
            return match[0] if inside else f"[{label}]({there.relative_to(docs).as_posix()}{anchor})"
        shown = label if label.startswith("`") else f"{label} (`{there.relative_to(ROOT).as_posix()}`)"
        return shown if there.exists() else match[0]  # a broken link stays, and fails the build

    return _LINK.sub(link, text)


def api_page(stub: str) -> str:
    """Returns the page of all public names, in the order and by the modules of ``__init__.pyi``."""
    lines = ["# Python API", "", "Every name is an attribute of `sparserow`.", ""]
    for statement in ast.parse(stub).body:
        if isinstance(statement, ast.ImportFrom):
            lines += [f"## {statement.module}", ""]
            for alias in statement.names:
                lines += [f"::: sparserow.{statement.module}.{alias.name}", ""]
    return "\n".join(lines)
