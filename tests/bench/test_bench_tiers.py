"""The tiers benchmark runs in its quick form and writes its rows."""

import json
from dataclasses import replace

import pytest
from sparserow.deploy.bench import tiers
from sparserow.deploy.cli import main


def test_quick_run_writes_the_agreed_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(tiers, "QUICK", replace(tiers.QUICK, rows=40_000, share=0.6, batch=512, warm_up=4))
    path = tmp_path / "tiers.json"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "tiers", "--quick", "--json", str(path)])
    assert ended.value.code == 0
    rows = json.loads(path.read_text())
    assert len(rows) == 13
    assert all(set(row) == {"metric", "value", "unit", "limit", "ratio"} for row in rows)
    shares = [row["value"] for row in rows if row["unit"] == "share"]
    assert 0 < shares[1] < shares[0] < 1  # uniform keys miss more often
    assert all(row["ratio"] > 0 for row in rows if row["unit"] != "share")
    assert all(row["limit"] is None for row in rows)


def test_rows_of_a_benchmark_without_them_is_one_line(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "wire", "--rows", "1000"])
    assert ended.value.code == 1
    assert "--rows" in capsys.readouterr().err


def test_zipf_ranks_follow_the_law():
    import numpy as np

    size = replace(tiers.QUICK, rows=1000, batch=200_000)
    ranks = tiers._zipf(np.random.default_rng(0), size, size.batch)
    counts = np.bincount(ranks, minlength=1000)
    assert ranks.min() == 0
    assert ranks.max() == 999
    assert 1.6 < counts[0] / counts[1] < 2.6
    assert counts[:100].sum() > counts[100:].sum()
