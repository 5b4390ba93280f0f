"""The benchmark from an event to its served row runs in its quick form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sparserow.deploy.bench import loop
from sparserow.deploy.cli import main

pytest.importorskip("confluent_kafka", reason="the extra kafka is not installed")


def test_the_quick_form_writes_the_agreed_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "QUICK", replace(loop.QUICK, rate=100, seconds=2.0))
    monkeypatch.setattr(loop, "_LIMIT_SEC", 10.0)  # because other tests run beside this one
    path = tmp_path / "loop.json"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "loop", "--quick", "--json", str(path)])
    assert ended.value.code == 0
    words = "loop: 100 events/s of 26 ids: "
    figures = {row["metric"].removeprefix(words): row["value"] for row in json.loads(path.read_text())}
    first = figures.pop("from the first event to its served row")
    median = figures.pop("from event to served row, p50")
    assert 0 < median <= figures.pop("from event to served row, p99")
    assert first > 0
    assert figures.pop("events whose row was not served") == 0
    # Because these come with heartbeats, of which a slow machine has none in so short a run, they may be 0.
    assert set(figures) == {"trained on", "not read yet at the end"}
