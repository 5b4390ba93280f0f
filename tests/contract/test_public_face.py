"""What a document or an example imports has a public name."""

from __future__ import annotations

import re
import subprocess
import sys

import sparserow as sr
from rooms import ROOT

IMPORT = re.compile(r"(?:from|import) sparserow\.(?:worker|proto|deploy|serving|ps_server)\b")


def test_documents_and_examples_import_no_room() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *(ROOT / "deploy" / "examples").rglob("*.py")]
    assert len(pages) > 40
    wrong = [
        f"{page.relative_to(ROOT)}:{number}: {line.strip()}"
        for page in pages
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if IMPORT.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_public_modules_are_attributes_and_load_nothing_before_they_are_used() -> None:
    script = (
        "import sys, sparserow as sr\n"
        "assert 'torch' not in sys.modules and 'ray' not in sys.modules\n"
        "modules = [sr.data, sr.errors, sr.features, sr.losses, sr.metrics, sr.models, sr.optim, sr.ray]\n"
        "assert 'ray' not in sys.modules\n"
        "print(sr.data.CandidateSampler, sr.losses.bce, sr.metrics.hit_rate, sr.models.DIN, sr.ray.train_on_ray)\n"
        "try:\n    sr.modles\nexcept AttributeError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "has no attribute 'modles'" in done.stdout


def test_at_most_fifty_names_stand_at_the_top() -> None:
    assert len(sr.__all__) <= 50
    assert all(getattr(sr, name) is not None for name in sr.__all__)
