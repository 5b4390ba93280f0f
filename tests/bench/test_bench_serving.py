"""The serving benchmark runs in its quick form and writes its rows."""

import json
from dataclasses import replace

import pytest

from sparserow.deploy.bench import serving
from sparserow.deploy.cli import main


def test_quick_run_writes_the_agreed_rows(tmp_path, monkeypatch):
    small = replace(
        serving.QUICK,
        table_rows=5_000,
        repetitions=50,
        saturation_sec=0.2,
        trial_sec=0.1,
        batches=(1000,),
        sync_sec=0.5,
    )
    monkeypatch.setattr(serving, "QUICK", small)
    path = tmp_path / "serving.json"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "serving", "--quick", "--json", str(path)])
    assert ended.value.code == 0
    rows = {row["metric"]: row for row in json.loads(path.read_text())}
    assert rows["lookup 1000 x 64 p50"]["ratio"] > 0
    assert rows["int8 rows: bytes per row in memory"]["value"] < 64 * 4
    assert rows["int8 rows: largest error against the largest weight"]["value"] < 1 / 200
    failed = next(row for name, row in rows.items() if name.startswith("failed lookups"))
    assert failed["value"] == 0
    assert rows["freshness p99 while a model trains, at most"]["value"] > 0
    assert rows["rows that live sync brings while it trains"]["value"] > 0
    assert next(row for name, row in rows.items() if name.startswith("training with live sync"))["ratio"] > 0
    assert rows["pushes of 1000 rows, nothing else: with live sync"]["ratio"] > 0
