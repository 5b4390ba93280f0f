"""The engine benchmark runs in its quick form, writes its rows, and its harness judges figures rightly."""

import json
from dataclasses import replace

import numpy as np
import pytest

from sparserow.cpp_ext import _server
from sparserow.deploy.bench import engine, engine_cores, harness
from sparserow.deploy.bench.engine_filling import Filling
from sparserow.deploy.cli import main


def test_quick_run_writes_the_agreed_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "QUICK", replace(engine.QUICK, rows=20_000, batch=1_000, fill_step=2_000))
    path = tmp_path / "engine.json"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "engine", "--quick", "--json", str(path)])
    assert ended.value.code == 0
    rows = json.loads(path.read_text())
    assert all(set(row) == {"metric", "value", "unit", "limit", "ratio", "higher_is_better"} for row in rows)
    metrics = " ".join(row["metric"] for row in rows)
    assert "pull" in metrics
    assert "push" in metrics
    assert "overhead" in metrics
    # There is no overhead where memory at hand had room for these few rows.
    assert all(row["value"] > 0 for row in rows if "overhead" not in row["metric"])
    assert all(row["limit"] is None for row in rows)  # the quick form judges nothing


def test_threads_on_cores_of_their_own_do_all_of_their_work():
    keys = np.arange(2_000, dtype=np.uint64)
    store, filling = _server.Store(), Filling(keys, 8, 500)
    filling.make_table(store)
    for _ in filling.fill(store):
        pass
    cpus = engine_cores.cores_of_machine()[:2]
    figures = engine_cores.cores_figures(store, keys, 8, 100, cpus)
    assert [figure.metric.split(" x ")[0] for figure in figures] == [
        "reference: " + name for name in ("pull", "push", "torch.index_select")
    ]
    assert all(figure.value > 0 and figure.ratio > 0 for figure in figures)
    (stats,) = store.stats()
    assert stats.rows == len(keys)


def test_cores_are_counted_once_however_many_cpus_they_have(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_cores.os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 5})
    for cpu, siblings in enumerate(("0,4", "1,5", "2", "3")):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    (tmp_path / "cpu5" / "topology").mkdir(parents=True)
    (tmp_path / "cpu5" / "topology" / "thread_siblings_list").write_text("1,5\n")
    assert engine_cores.cores_of_machine(tmp_path) == [0, 1, 2, 3]


def test_a_missing_folder_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "engine", "--json", str(tmp_path / "none" / "x.json")])
    assert ended.value.code == 1
    assert "the folder of the file does not exist" in capsys.readouterr().err


def test_contenders_take_turns_on_fresh_inputs():
    calls: list[tuple[str, int]] = []
    fresh = iter(range(1000))
    contenders = [
        harness.Contender(name, lambda: next(fresh), lambda value, name=name: calls.append((name, value)))
        for name in ("a", "b")
    ]
    seconds = harness.time_in_turns(contenders, repetitions=6, warm_up=2)
    assert [len(each) for each in seconds] == [6, 6]
    assert len({value for _, value in calls}) == len(calls) == 16
    assert [name for name, _ in calls[:4]] == ["a", "b", "b", "a"]


def test_a_figure_is_judged_by_its_ratio_where_it_has_one():
    figure = harness.Figure("m", value=5.0, unit="x", limit=0.8, ratio=0.7)
    assert figure.passes is False
    assert replace(figure, ratio=0.9).passes is True
    assert replace(figure, ratio=None, limit=4.0).passes is True
    assert replace(figure, ratio=None, limit=4.0, higher_is_better=False).passes is False
    assert replace(figure, limit=None).passes is None
