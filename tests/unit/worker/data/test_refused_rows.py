"""Rows that features refuse, and lines that are no objects: what a part costs does not depend on how many there are."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pa_json
import pyarrow.parquet as pq
import pytest

from sparserow.proto.config.data_config import DataConfig
from sparserow.proto.features.base import Feature
from sparserow.proto.features.kinds import IdFeature, MultiHotFeature, NumericFeature, TimeFeature
from sparserow.proto.options.document import load_config
from sparserow.worker.data import BadLine, ClickReader, ReadOptions, line_windows
from sparserow.worker.data.line_windows import LinePosition, LineWindow
from sparserow.worker.data.sources import feature_columns, fit_features, json_lines as json_lines_source, open_reader

ROWS = 2000


def reader_of(path: Path, form: str, features: tuple[Feature, ...], policy: str) -> ClickReader:
    sets = [f"train={path}", f"test={path}", f"format={form}", f"on_bad_line={policy}", "columns={label: y}"]
    config = load_config(DataConfig, None, sets)
    config.read_features(features)
    return open_reader(config, "train", fit_features(config), ReadOptions(batch_size=ROWS))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each feature is computed."""
    calls: Counter[str] = Counter()

    def counting(compute: Any) -> Any:
        def call(feature: Feature, *others: Any) -> Any:
            calls[feature.name] += 1
            return compute(feature, *others)

        return call

    for name in ("computed", "numbers_before_statistics"):
        monkeypatch.setattr(feature_columns, name, counting(getattr(feature_columns, name)))
    return calls


def arrays_of(values: Any) -> list[Any]:
    return [array.tolist() for array in (values if isinstance(values, tuple) else (values,))]


def table_and_good_rows() -> tuple[pa.Table, np.ndarray]:
    """Rows of which each feature refuses some, and which rows none does."""
    draw = np.random.default_rng(4)
    bad = {name: draw.random(ROWS) < 0.1 for name in ("tags", "x", "word", "day", "y")}
    bad["x"][:5], bad["tags"][:5], bad["y"][:5] = False, False, False
    bad["day"][:5], bad["word"][:5] = False, [False, False, True, False, False]
    columns = {
        "y": pa.array(np.where(bad["y"], 7, np.arange(ROWS) % 2)),
        "tags": pa.array([list(range(6 if each else row % 4)) for row, each in enumerate(bad["tags"])]),
        "x": pa.array(np.where(bad["x"], 1e39, np.arange(ROWS))),
        "word": pa.array(
            [None if each and row % 2 else "none" if each else "ab"[row % 2] for row, each in enumerate(bad["word"])]
        ),
        "day": pa.array(["never" if each else f"2024-02-{1 + row % 29:02}" for row, each in enumerate(bad["day"])]),
        "user": pa.array(np.arange(ROWS)),
    }
    return pa.table(columns), ~np.logical_or.reduce(list(bad.values()))


def test_each_feature_is_computed_once_for_each_reason_to_refuse(tmp_path: Path, counted: Counter[str]) -> None:
    table, good = table_and_good_rows()
    pq.write_table(table, tmp_path / "log.parquet")
    pq.write_table(table.filter(pa.array(good)), tmp_path / "good.parquet")
    (tmp_path / "words.txt").write_text("a\nb\n")
    features = (
        MultiHotFeature("tags", max_len=5),
        NumericFeature("x"),
        IdFeature("word", vocabulary=str(tmp_path / "words.txt"), unknown="refuse", on_null="refuse"),
        TimeFeature("day", part="day"),
        IdFeature("user"),
    )
    reader = reader_of(tmp_path / "log.parquet", "parquet", features, "skip")
    counted.clear()
    (batch,) = reader
    assert counted == {"tags": 2, "x": 2, "word": 3, "day": 2, "user": 1}
    assert reader.bad_lines == ROWS - good.sum()
    assert "row 3, column word: it has 'none', which is not in the vocabulary" in str(reader.first_bad_line)
    (expected,) = reader_of(tmp_path / "good.parquet", "parquet", features, "error")
    assert batch.labels.tolist() == expected.labels.tolist()
    for name, found in expected.tensors.items():
        assert arrays_of(batch.tensors[name]) == arrays_of(found), name
    with pytest.raises(BadLine, match="row 3, column word: it has 'none'"):
        list(reader_of(tmp_path / "log.parquet", "parquet", features, "error"))


def test_a_part_whose_rows_are_all_refused_has_none(tmp_path: Path, counted: Counter[str]) -> None:
    table = pa.table({"y": [1] * ROWS, "tags": [[1, 2]] * ROWS, "at": ["2024-01-01"] * ROWS})
    good = table.slice(0, 1).set_column(1, "tags", pa.array([[1]]))
    with pq.ParquetWriter(tmp_path / "log.parquet", table.schema) as writer:
        writer.write_table(table)
        writer.write_table(good)
    reader = reader_of(tmp_path / "log.parquet", "parquet", (MultiHotFeature("tags", max_len=1),), "skip")
    counted.clear()
    assert sum(len(batch) for batch in reader) == 1
    assert reader.bad_lines == ROWS
    assert "row 1, column tags: it has 2 keys" in str(reader.first_bad_line)
    assert counted["tags"] == 3, "twice for the part that lacks rows, once for the other one"


def json_lines(bad: str) -> list[str]:
    """Lines of which a fifth is bad, in no order that halving could use."""
    draw = np.random.default_rng(7)
    return [bad if draw.random() < 0.2 else json.dumps({"y": row % 2, "x": row / 4}) for row in range(5 * ROWS)]


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("{broken", "Missing a name for object member"),
        ('{"y": 1, "x": "many"}', r"Column\(/x\) changed from number to string"),
        ('{"y": 1, "x": 1e400}', "Number too big to be stored in double"),
        ('{"y": 1} {"y": 1}', "2 objects"),
        ('{"y": 1, "z": "\\ud800"}', "The surrogate pair in string is invalid"),
        ("null", "it is no object"),
        ("x", "it is no object"),
    ],
)
def test_bad_lines_of_json_do_not_add_calls_of_arrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str, problem: str
) -> None:
    lines = json_lines(bad)
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
    reader = reader_of(tmp_path / "log.jsonl", "jsonl", (NumericFeature("x"),), "skip")
    calls: list[int] = []
    parse = pa_json.read_json

    def counting(*given: Any) -> Any:
        calls.append(1)
        return parse(*given)

    monkeypatch.setattr(json_lines_source.pa_json, "read_json", counting)
    found = [int(x * 4) for batch in reader for x in batch.dense[:, 0]]
    assert found == [row for row, line in enumerate(lines) if line != bad]
    assert reader.bad_lines == lines.count(bad)
    assert re.search(f"line {lines.index(bad) + 1}: .* cannot be read: {problem}", str(reader.first_bad_line))
    assert len(calls) <= 1 + 3 * (len(lines) // 1024 + 1), "each run of 1,024 lines has three at most"
    with pytest.raises(BadLine, match=rf"line {lines.index(bad) + 1}: "):
        list(reader_of(tmp_path / "log.jsonl", "jsonl", (NumericFeature("x"),), "error"))


def test_a_window_is_cut_into_pieces_after_one_look_at_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    find = line_windows._line_ends

    def counting(block: bytes) -> Any:
        looks.append(len(block))
        return find(block)

    monkeypatch.setattr(line_windows, "_line_ends", counting)
    text = b"".join(b"%d\n" % number for number in range(5000))
    window = LineWindow("log.csv", LinePosition(0, 3), text, 5000)
    pieces = list(window.pieces(1024))
    assert looks == [len(text)]
    assert b"".join(piece.text for piece in pieces) == text
    assert [(piece.place.line, piece.lines) for piece in pieces] == [(3 + 1000 * at, 1000) for at in range(5)]
    assert all(text[piece.place.offset :].startswith(piece.text) for piece in pieces)
