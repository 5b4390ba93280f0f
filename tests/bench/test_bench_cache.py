"""``bench cache`` in its quick form: figures of real runs; the sizes here judge nothing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sparserow.deploy.bench import cache
from sparserow.deploy.cli import main


def test_the_quick_form_measures_what_each_run_saves(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "QUICK", replace(cache.QUICK, rows=4_000, warm_up=12, steps=6))
    path = tmp_path / "cache.json"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "cache", "--quick", "--json", str(path)])
    assert ended.value.code == 0
    rows = {row["metric"]: row for row in json.loads(path.read_text())}
    saved = {name.split(": ")[0]: row["ratio"] for name, row in rows.items() if name.endswith("ratio saved")}
    read, exact, bounded = (saved[f"cache, {run}"] for run in ("rows nobody changes", *cache.TRAINING))
    assert read > bounded > 0.1 > exact
    assert rows[f"cache, {cache.TRAINING[0]}: hits"]["value"] == 0
    assert rows["cache, rows nobody changes: hits"]["value"] > 10
    assert any("ns/key" in name for name in rows)
