"""The checkpoint benchmark runs in its quick form and writes its rows."""

import json
from dataclasses import replace

import pytest

from sparserow.deploy.bench import checkpoint
from sparserow.deploy.cli import main


def test_quick_run_writes_the_agreed_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "QUICK", replace(checkpoint.QUICK, rows=8_000, samples=20, closed_sec=0.1))
    path = tmp_path / "checkpoint.json"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "checkpoint", "--quick", "--json", str(path)])
    assert ended.value.code == 0
    rows = json.loads(path.read_text())
    assert len(rows) == 19
    assert all(set(row) == {"metric", "value", "unit", "limit", "ratio", "higher_is_better"} for row in rows)
    named = {row["metric"].split(":")[0]: row for row in rows}
    assert 0 < named["bytes of a save after 1 % of the rows changed"]["ratio"] < 0.5
    assert named["save"]["ratio"] > 0
    assert named["restore onto an empty shard"]["ratio"] > 0
    values = {row["metric"]: row["value"] for row in rows}
    (service, service_busy), (due, due_busy) = (
        [value for name, value in values.items() if name.startswith(what)] for what in ("service time", "time from due")
    )
    assert service <= due  # each push ends as long after its start as after it was due, or less
    assert service_busy <= due_busy
