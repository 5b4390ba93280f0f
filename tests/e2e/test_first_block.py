"""README's first block, as its reader runs it: a script in an empty folder, which prints what the page says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from doc_blocks import doc_blocks


@pytest.mark.timeout(300)
def test_the_first_block_prints_what_the_page_says(tmp_path: Path) -> None:
    blocks = [block for block in doc_blocks() if block.page == "README.md"]
    at, script = next((at, block) for at, block in enumerate(blocks) if block.language == "python")
    done = subprocess.run(
        [sys.executable, "-c", script.text], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == blocks[at + 1].text
