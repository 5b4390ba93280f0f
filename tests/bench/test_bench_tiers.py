"""The tiers benchmark runs in its quick form and writes its rows."""

import json
from dataclasses import replace

import pytest

from sparserow.cpp_ext import _bench, _server
from sparserow.deploy.bench import big_table, tiers
from sparserow.deploy.cli import main


def test_quick_run_writes_the_agreed_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(tiers, "QUICK", replace(tiers.QUICK, rows=40_000, share=0.6, batch=512, warm_up=4))
    path = tmp_path / "tiers.json"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "tiers", "--quick", "--json", str(path)])
    assert ended.value.code == 0
    rows = json.loads(path.read_text())
    engines = 2 if _server.has_rocksdb() else 1
    accesses = [row for row in rows if "pages alone" in row["metric"]]
    assert {row["metric"].rsplit(", ", 1)[-1] for row in accesses} >= {"through the cache"}
    assert len(accesses) % 2 == 0  # wall and CPU time of each way
    assert ("io_uring" in str(accesses)) == (_bench.has_io_uring() and "reader threads" in str(accesses))
    assert all(row["value"] > 0 for row in accesses)
    assert len(rows) - len(accesses) == 1 + 34 * engines + 2  # what pages write to the disk is counted
    assert all(set(row) == {"metric", "value", "unit", "limit", "ratio", "higher_is_better"} for row in rows)
    shares = [row["value"] for row in rows if row["unit"] == "share"]
    simulated = [row["value"] for row in rows if row["unit"] == "simulated share"]
    assert len(simulated) == 4 * engines
    assert all(0 < share < 1 for share in simulated)
    for engine in range(engines):
        zipf, uniform = shares[2 * engine : 2 * engine + 2]
        assert 0 < uniform < zipf < 1  # uniform keys miss more often
    assert sum(row["ratio"] is not None for row in rows) == 8 * engines
    assert all(row["ratio"] > 0 for row in rows if row["ratio"] is not None)
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


def test_the_log_of_the_big_table_is_criteos_and_nearly_every_id_is_new(tmp_path):
    import numpy as np

    path = tmp_path / "log.tsv"
    big_table.write_log(path, 60_000, np.random.default_rng(0), fresh=0.95)
    lines = [line.split("\t") for line in path.read_text().splitlines()]
    assert len(lines) == 60_000
    assert {len(line) for line in lines} == {40}
    assert {line[0] for line in lines} == {"0", "1"}
    for column in (14, 39):
        ids = [line[column] for line in lines]
        assert all(len(one) == 8 and int(one, 16) >= 0 for one in ids)
        assert 0.94 < len(set(ids)) / len(ids) < 0.97


def test_the_big_table_is_trained_within_its_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(big_table, "QUICK", replace(big_table.QUICK, rows=70_000, test_lines=64))
    path = tmp_path / "big.json"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "big_table", "--quick", "--json", str(path)])
    assert ended.value.code == 0
    rows = {row["metric"]: row for row in json.loads(path.read_text())}
    assert 60_000 < rows["rows of all tables"]["value"] < 80_000
    assert 0 < rows["keys of pulls and commits in memory"]["value"] < 1
    assert 0 < rows["used of it at the end"]["ratio"] <= 1
