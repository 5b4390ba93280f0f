"""Writes the table of docs/errors.md from proto/errors.py: ``python -m sparserow.deploy.reference.errors_reference``.

A test compares the page with the output.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from ...proto.errors import all_errors

PAGE = Path(__file__).resolve().parents[2] / "docs" / "errors.md"

_BEGIN = "| code | number | retry | meaning |"


def render(page: str) -> str:
    """Returns the page with a new table.

    Args:
        page: the present page; the table reaches from its head to the next heading.
    """
    before, _, rest = page.partition(_BEGIN)
    heading = re.search(r"^## ", rest, re.MULTILINE)
    assert heading is not None
    lines = [_BEGIN, "|---|---|---|---|"]
    for kind in all_errors():
        meaning = " ".join((inspect.getdoc(kind) or "").split())
        lines.append(f"| `{kind.code}` | {kind.number} | {'yes' if kind.retryable else 'no'} | {meaning} |")
    return before + "\n".join(lines) + "\n\n" + rest[heading.start() :]


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE}")
