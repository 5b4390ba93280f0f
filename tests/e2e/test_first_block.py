"""README's first block, as its reader runs it: a script in an empty folder, which prints what the page says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from doc_blocks import readme_first_block


@pytest.mark.timeout(300)
def test_the_first_block_prints_what_the_page_says(tmp_path: Path) -> None:
    script, printed = readme_first_block()
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed
