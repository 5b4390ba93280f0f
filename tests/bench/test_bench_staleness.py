"""The staleness benchmark runs in its quick form; its analytic bound is what its docstring says."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from sparserow.deploy.bench import staleness
from sparserow.deploy.bench.staleness import PROBABILITY, Size, ideal_sec
from sparserow.deploy.cli import main


def test_the_quick_form_writes_every_mode(tmp_path, monkeypatch):
    monkeypatch.setattr(staleness, "QUICK", replace(staleness.QUICK, steps=5, sleep_sec=0.002))
    path = tmp_path / "staleness.json"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "staleness", "--quick", "--json", str(path)])
    assert ended.value.code == 0
    metrics = " ".join(row["metric"] for row in json.loads(path.read_text()))
    assert all(f"staleness {name}:" in metrics for name in ("sync", "k=1", "k=4", "async"))


def test_the_analytic_bound():
    size, step = Size(steps=8_000, sleep_sec=0.1), 0.005
    sync, one, four, never = (ideal_sec(mode, size, step) / size.steps for mode in (0, 1, 4, None))
    assert sync == pytest.approx(step + 0.1 * (1 - (1 - PROBABILITY) ** 2), rel=0.03)
    assert never == pytest.approx(step + 0.1 * PROBABILITY, rel=0.05)
    assert sync > one > four > never
    assert np.allclose(ideal_sec(10**6, size, step), never * size.steps)
