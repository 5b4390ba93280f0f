"""The staleness benchmark runs in its quick form; its analytic bound is what its docstring says."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from sparserow.deploy.bench import staleness
from sparserow.deploy.bench.staleness import PROBABILITY, Size, ideal_quorum_sec, ideal_sec
from sparserow.deploy.cli import main


def test_the_quick_form_writes_every_mode(tmp_path, monkeypatch):
    monkeypatch.setattr(staleness, "QUICK", replace(staleness.QUICK, steps=5, sleep_sec=0.002))
    path = tmp_path / "staleness.json"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "staleness", "--quick", "--json", str(path)])
    assert ended.value.code == 0
    metrics = " ".join(row["metric"] for row in json.loads(path.read_text()))
    assert all(f"staleness {name}:" in metrics for name in ("sync", "k=1", "k=4", "async", "quorum 2 of 3"))


def test_the_analytic_bound():
    size, step = Size(steps=8_000, sleep_sec=0.1), 0.005
    sync, one, four, never = (ideal_sec(mode, size, step) / size.steps for mode in (0, 1, 4, None))
    assert sync == pytest.approx(step + 0.1 * (1 - (1 - PROBABILITY) ** 2), rel=0.03)
    assert never == pytest.approx(step + 0.1 * PROBABILITY, rel=0.05)
    assert sync > one > four > never
    assert np.allclose(ideal_sec(10**6, size, step), never * size.steps)


def test_the_analytic_bound_of_a_quorum(monkeypatch):
    size, step = Size(steps=8_000, sleep_sec=0.1), 0.005
    quorum = ideal_quorum_sec(size, step) / size.steps
    assert step < quorum < ideal_sec(0, size, step) / size.steps
    monkeypatch.setattr(staleness, "sleeps_of", lambda rank, size: np.full(size.steps, 1.0 if rank == 2 else 0.0))
    # Two are never held up; the third begins step 0, and is done with it after the others have taken all their steps.
    assert ideal_quorum_sec(Size(steps=10, sleep_sec=1.0), 0.25) == pytest.approx(2.5)
    assert ideal_quorum_sec(Size(steps=2, sleep_sec=1.0), 0.25) == pytest.approx(1.25)
    monkeypatch.setattr(staleness, "sleeps_of", lambda rank, size: np.full(size.steps, 1.0 if rank else 0.0))
    assert ideal_quorum_sec(Size(steps=3, sleep_sec=1.0), 0.25) == pytest.approx(3 * 1.25)
