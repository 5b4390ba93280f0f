"""``bench own_model``: bytes are those of the batches' keys, and jobs of both kinds have rates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparserow.deploy.bench import own_model


def test_bytes_are_set_beside_the_keys_of_the_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    size = replace(own_model.QUICK, batch=512, history=20, rows=20_000, users=2_000, items=5_000, steps=3)
    figures = {figure.metric.rpartition(": ")[2]: figure for figure in own_model.run_own_model(size)}
    keys = figures["unique keys"].value
    assert 512 < keys <= 512 * 60, "the users and items of a batch, each once"
    both = figures["both ways, of twice (8 + 4 dim) a key"]
    assert both.ratio == pytest.approx(both.value * 1e6 / (keys * 2 * (8 + 4 * size.dim)), rel=1e-6)
    assert both.ratio is not None
    assert 1.0 < both.ratio < 1.2, "frames and the evaluation of 16 samples come on top"
    sent, received = (figures[f"{way} the shards"].value for way in ("to", "from"))
    assert sent + received == pytest.approx(both.value)
    assert figures["prefetch 2, of DDP and local layers"].limit == own_model.LIMIT_OF_TORCH
    assert all(figure.value > 0 for figure in figures.values())
    assert not list(tmp_path.iterdir()), "no model is kept"
