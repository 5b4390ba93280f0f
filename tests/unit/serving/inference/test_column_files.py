"""Files of columns for ``sparserow predict``: a text stays a text, batches, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

import sparserow as sr
from sparserow.proto.features.feature_set import FeatureSet
from sparserow.proto.options.csv_dialect import CsvDialect
from sparserow.serving.inference import column_files
from sparserow.serving.inference.column_files import check_exists
from sparserow.worker.data.sources.table_columns import TableColumns, has_columns
from sparserow.worker.data.sources.text_columns import FALLBACK, CsvColumns


def features() -> FeatureSet:
    return sr.features.Features([sr.features.IdFeature("user"), sr.features.NumericFeature("age")]).set


def read_columns(path: Path, read_by: FeatureSet, rows: int, dialect: CsvDialect = FALLBACK, **options):
    """As ``sparserow predict`` reads a file."""
    check_exists(path)
    source = TableColumns(path, read_by) if has_columns(path) else CsvColumns(path, read_by, dialect)
    return column_files.read_columns(path, source, read_by, rows, **options)


def test_a_column_of_csv_that_is_a_key_is_read_as_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("age,user,other\n1.5,007,x\n2,7,\n")
    (columns,) = read_columns(path, features(), 10)
    arrays = features()(columns)
    assert arrays["user"].tolist() == [sr.hash_key("007"), sr.hash_key("7")]
    assert arrays["age"].tolist() == [1.5, 2.0]


def test_cells_of_csv_are_what_the_features_read(tmp_path: Path) -> None:
    """As in training, an empty cell and a missing text are nulls, and a list is a field with its own delimiter."""
    some = sr.features.Features(
        [
            sr.features.IdFeature("user", default="nobody"),
            sr.features.IdFeature("age_key", column="age"),
            sr.features.NumericFeature("age"),
            sr.features.MultiHotFeature("tags", weights="weights"),
            sr.features.SequenceFeature("seen"),
            sr.features.TimeFeature("hour", column="at"),
        ]
    )
    path = tmp_path / "rows.csv"
    path.write_text("user;age;tags;weights;seen;at\n?;7;a+b;1+2;x;2024-01-05T06:00:00\n;;?;;+y;\n")
    (columns,) = read_columns(
        path, some.set, 10, FALLBACK.changed({"delimiter": ";", "list_delimiter": "+", "missing": ("?",)})
    )
    typed = {"user": [None, None], "age": [7, None], "tags": [["a", "b"], None], "weights": [[1.0, 2.0], None]}
    typed |= {"seen": [["x"], [None, "y"]], "at": ["2024-01-05T06:00:00", None]}
    found, wanted = some(columns), some(typed)
    for name, value in wanted.items():
        pairs = zip(found[name], value, strict=True) if isinstance(value, tuple) else [(found[name], value)]
        assert all(torch.equal(*pair) for pair in pairs), name
    path.write_text("user;age;tags;weights;seen;at\n1;1.50;;;;\n")
    with pytest.raises(
        sr.errors.InvalidArgument, match=r"'age' is read as a number and as a text, so .* plain integers"
    ):
        list(read_columns(path, some.set, 10, FALLBACK.changed({"delimiter": ";", "list_delimiter": "+"})))
    for options, message in (({"delimiter": "||"}, "delimiter: .* one ASCII"), ({"list_delimiter": ""}, "list_delim")):
        with pytest.raises(sr.errors.InvalidArgument, match=message):
            FALLBACK.changed(options)


def test_the_dialect_of_training_reads_alike(tmp_path: Path) -> None:
    """Columns without a header, spaces, comments, quotes and missing texts: as ``data.csv`` of a job has them."""
    dialect = CsvDialect(
        columns=("age", "user", "label"), header=False, quote="'", comment="#", trim=True, missing=("?",)
    )
    path = tmp_path / "rows.csv"
    path.write_text("# made by hand\n39, Private , 0\n50,'a,b', 1\n# more\n38, ?, 0\n")
    (columns,) = read_columns(path, features(), 10, dialect)
    assert columns.column("user").to_pylist() == ["Private", "a,b", None]
    assert columns.column("age").to_pylist() == [39.0, 50.0, 38.0]
    path.write_text("label,user,age\n0,'x',1\n")
    (columns,) = read_columns(path, features(), 10, dialect.changed({"header": True, "columns": ()}))
    assert columns.column("user").to_pylist() == ["x"]
    path.write_text("39, Private\n")
    with pytest.raises(sr.errors.InvalidArgument, match=r"rows\.csv, line 1"):
        list(read_columns(path, features(), 10, dialect))


def test_json_lines_keep_texts_and_ids(tmp_path: Path) -> None:
    """A text that looks like a date is no time, ids of 64 bits are no floats, and weights may have fractions later."""
    some = sr.features.Features(
        [
            sr.features.IdFeature("day"),
            sr.features.IdFeature("user"),
            sr.features.MultiHotFeature("tags", weights="weights"),
        ]
    )
    path = tmp_path / "rows.jsonl"
    rows = [{"day": "2024-01-05", "user": 2**64 - 1, "tags": ["a"], "weights": [1]} for _ in range(40_000)]
    rows.append({"day": "2024-01-06", "user": 7, "tags": ["b"], "weights": [0.5]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert path.stat().st_size > 2 << 20  # the first lines, which give the types, are a mebibyte
    tables = list(read_columns(path, some.set, 1024))
    whole = pa.concat_tables(tables)
    assert len(whole) == len(rows)
    found, wanted = some(whole), some({name: [row[name] for row in rows] for name in rows[0]})
    for name, value in wanted.items():
        pairs = zip(found[name], value, strict=True) if isinstance(value, tuple) else [(found[name], value)]
        assert all(torch.equal(*pair) for pair in pairs), name


def test_rows_come_in_batches(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pa.parquet.write_table(pa.table({"user": range(10), "age": [1.0] * 10, "b": [[1]] * 10}), path, row_group_size=6)
    batches = list(read_columns(path, features(), 4))
    assert max(len(batch) for batch in batches) == 4
    assert pa.concat_tables(batches).column("user").to_pylist() == list(range(10))


def test_what_is_wrong_with_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with pytest.raises(sr.errors.NotFound, match=r"--input .*rows\.csv: the file does not exist"):
        list(read_columns(path, features(), 4))
    path.write_text("age,usr\n1,2\n")
    with pytest.raises(sr.errors.InvalidArgument, match=r"there is no column 'user', which .*; columns: age, usr"):
        list(read_columns(path, features(), 4))
    path.write_text("age,user\nold,2\n")
    with pytest.raises(sr.errors.InvalidArgument, match=r"rows\.csv, line 2, column .*age.*old"):
        list(read_columns(path, features(), 4))
    damaged = tmp_path / "rows.parquet"
    damaged.write_bytes(b"PAR1 and no more")
    with pytest.raises(sr.errors.DataLoss, match=r"rows\.parquet: "):
        list(read_columns(damaged, features(), 4))


def test_columns_that_are_kept_and_columns_of_nulls(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pa.parquet.write_table(pa.table({"user": [1, 2], "name": ["a", "b"]}), path)
    (columns,) = read_columns(path, features(), 10, keep=["name", "user"], nulls=True)
    assert columns.column_names == ["user", "name", "age"]
    assert features()(columns)["age"].tolist() == [0.0, 0.0], "the default of a null"
    with pytest.raises(sr.errors.InvalidArgument, match=r"--keep nme: .* has no such column; columns: user, name"):
        list(read_columns(path, features(), 10, keep=["nme"]))
    pa.parquet.write_table(pa.table({"name": ["a"]}), path)
    with pytest.raises(sr.errors.InvalidArgument, match=r"there is no column 'user', which the features read"):
        list(read_columns(path, features(), 10, nulls=True))
