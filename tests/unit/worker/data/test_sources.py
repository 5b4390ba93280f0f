"""Sources of samples: formats, storage, partitions, predicates, pruning, and bad input."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest

from column_uses import data_of
from s3_server import s3_bucket, s3_server
from sparserow.proto.config.data_config import DataConfig
from sparserow.proto.errors import DataLoss, InvalidArgument, NotFound
from sparserow.proto.features.kinds import IdFeature, MultiHotFeature, SequenceFeature
from sparserow.proto.row_keys import hash_key
from sparserow.worker.data import BadLine, Batch, ClickReader, ReadOptions
from sparserow.worker.data.sources import fit_features, ipc, open_reader, parquet

ROLES = "{label: y, numeric: {x: none, f: standardize}, categorical: [c, k], buckets: {f: 8}}"
ROWS = 600
FORMATS = ("parquet", "orc", "arrow", "jsonl")


def log_table() -> pa.Table:
    random = np.random.default_rng(5)
    floats = [None if random.random() < 0.1 else float(random.normal(3, 2)) for _ in range(ROWS)]
    words = [None if random.random() < 0.1 else str(random.choice(["a", "bb", "é", "2024-01-05"])) for _ in range(ROWS)]
    return pa.table(
        {
            "unused": pa.array([[1, 2]] * ROWS),
            "y": pa.array(random.integers(0, 2, ROWS), pa.int64()),
            "x": pa.array(range(ROWS), pa.int64()),
            "f": pa.array(floats, pa.float64()),
            "c": pa.array(words, pa.string()),
            "k": pa.array(random.integers(-5, 5, ROWS), pa.int64()),
        }
    )


def write(table: pa.Table, path: Path, form: str, rows: int = 100) -> Path:
    """Writes a table in parts of ``rows`` rows."""
    if form == "parquet":
        pq.write_table(table, path, row_group_size=rows)
    elif form == "orc":
        orc.write_table(table, str(path))
    elif form == "arrow":
        feather.write_feather(table, path, compression="zstd", chunksize=rows)
    elif form == "csv":
        cells = [[row[name] for name in ("y", "x", "f", "c", "k")] for row in table.to_pylist()]
        texts = (",".join("" if value is None else str(value) for value in row) for row in cells)
        path.write_text("y,x,f,c,k\n" + "".join(text + "\n" for text in texts))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return path


def config_of(path: Any, form: str, *sets: str, roles: str = ROLES) -> DataConfig:
    section = f"csv={{header: true, {roles[1:]}" if form == "csv" else f"columns={roles}"
    return data_of(f"train={path}", f"test={path}", f"format={form}", section, *sets)


def reader_of(config: DataConfig, **options: Any) -> ClickReader:
    return open_reader(config, "train", fit_features(config), ReadOptions(**{"batch_size": 64, **options}))


def rows_of(batches: Any) -> list[int]:
    return [int(x) for batch in batches for x in batch.dense[:, 0]]


def assert_same(one: list[Batch], other: list[Batch]) -> None:
    for a, b in zip(one, other, strict=True):
        for name in ("dense", "sparse", "labels"):
            np.testing.assert_array_equal(getattr(a, name).numpy(), getattr(b, name).numpy(), err_msg=name)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_has_the_ids_and_numbers_of_csv_bit_for_bit(tmp_path, form):
    table = log_table()
    text = list(reader_of(config_of(write(table, tmp_path / "log.csv", "csv"), "csv")))
    found = list(reader_of(config_of(write(table, tmp_path / f"log.{form}", form), form)))
    assert_same(found, text)
    assert found[0].sparse[:, 1].tolist() == [hash_key(str(key)) for key in table.column("k").to_pylist()[:64]]
    assert sum(map(len, found)) == ROWS


def test_types_of_columns_and_what_they_become(tmp_path):
    words = ["a", "", None, "ä"]
    table = pa.table(
        {
            "y": pa.array([True, False, True, False]),
            "n0": pa.array([1, None, 3, -4], pa.int8()),
            "n1": pa.array([1.5, float("nan"), 3, -4], pa.float32()),
            "n2": pa.array([True, None, False, True]),
            "unit price": pa.array([Decimal("1.25"), None, Decimal(3), Decimal(-4)], pa.decimal128(9, 2)),
            "c0": pa.array(words).dictionary_encode(),
            "c1": pa.array(words, pa.large_string()),
            "c2": pa.array([None if word is None else word.encode() for word in words], pa.binary()),
            "c3": pa.array([1, 2**63 + 1, None, 0], pa.uint64()),
            "c4": pa.array([True, False, None, True]),
        }
    )
    path = tmp_path / "types.parquet"
    pq.write_table(table, path)
    roles = "{label: y, numeric: {n0: none, n1: none, n2: none, unit price: none}, categorical: [c0, c1, c2, c3, c4]}"
    (batch,) = reader_of(config_of(path, "parquet", roles=roles))
    assert batch.labels.tolist() == [1, 0, 1, 0]
    assert batch.dense.tolist() == [[1, 1.5, 1, 1.25], [0, 0, 0, 0], [3, 3, 0, 3], [-4, -4, 1, -4]]
    for column in range(3):
        assert batch.sparse[:, column].tolist() == [hash_key(word or "") for word in words]
    assert batch.sparse[:, 3].tolist() == [hash_key(text) for text in ("1", str(2**63 + 1), "", "0")]
    assert batch.sparse[:, 4].tolist() == [hash_key(text) for text in ("1", "0", "", "1")]
    where = ["where=column(\"unit price\") > -5 and y == True and c1 != '' and n1 >= 0"]
    (batch,) = reader_of(config_of(path, "parquet", *where, roles=roles))
    assert batch.dense[:, 3].tolist() == [1.25]


@pytest.mark.parametrize("form", FORMATS)
def test_hive_partitions_are_columns_and_where_reads_some_rows(tmp_path, form):
    table = log_table()
    for at, day in enumerate(["2024-01-05", "2024-01-06", "2024-01-07"]):
        for hour in (0, 1):
            folder = tmp_path / f"day={day}" / f"hour={hour}"
            folder.mkdir(parents=True)
            write(table.slice((at * 2 + hour) * 100, 100), folder / "part", form, 30)
    (tmp_path / "_SUCCESS").touch()  # no data
    roles = "{label: y, numeric: {x: none}, categorical: [day, hour, c]}"
    every = list(reader_of(config_of(tmp_path, form, roles=roles)))
    assert rows_of(every) == list(range(ROWS))
    assert every[0].sparse[0, :2].tolist() == [hash_key("2024-01-05"), hash_key("0")]
    assert every[-1].sparse[-1, :2].tolist() == [hash_key("2024-01-07"), hash_key("1")]

    def rows(where: str) -> list[int]:
        return rows_of(reader_of(config_of(tmp_path, form, f"where={where}", roles=roles)))

    x, f, c = (table.column(name).to_pylist() for name in "xfc")
    assert rows("day == '2024-01-06' and hour == 1") == list(range(300, 400))
    assert rows("day > '2024-01-05' and (x < 210 or x >= 595)") == [*range(200, 210), *range(595, 600)]
    assert rows("f > 3.5 and hour != 1") == [i for i in x if (f[i] or 0) > 3.5 and i // 100 % 2 == 0]
    assert rows("c in ['a', 'bb'] and x < 50") == [i for i in x[:50] if c[i] in ("a", "bb")]
    assert rows("c not in ['a', 'bb'] and x < 50") == [i for i in x[:50] if c[i] not in ("a", "bb", None)]
    assert rows("c is None and 100 <= x < 200") == [i for i in x[100:200] if c[i] is None]
    with pytest.raises(InvalidArgument, match=r"no rows that data\.where selects"):
        rows("hour == 7")


def test_of_partitions_that_where_excludes_no_row_is_read(tmp_path, monkeypatch):
    for hour in ("0", "1", "2"):
        (tmp_path / f"hour={hour}").mkdir()
        write(log_table(), tmp_path / f"hour={hour}" / "part", "arrow")
    read: list[tuple[str, ...]] = []
    original = ipc.IpcFile.read

    def counted(self, place, names, policy):
        read.append(names)
        return original(self, place, names, policy)

    monkeypatch.setattr(ipc.IpcFile, "read", counted)
    for where, files in (("hour == 1 and x >= 0", 1), ("hour in [0, 2]", 2), ("hour > 0", 2), ("x >= 0", 3)):
        read.clear()
        roles = "{label: y, numeric: {x: none}, categorical: [hour]}"
        batches = list(reader_of(config_of(tmp_path, "arrow", f"where={where}", roles=roles)))
        assert rows_of(batches) == list(range(ROWS)) * files
        parts = ROWS // 100 * files
        counted = "x" in where  # for the statistics and for the reader, where the path does not decide
        assert len(read) == (3 if counted else 1) * parts


def test_the_partition_without_a_value_is_null(tmp_path):
    for hour in ("1", "__HIVE_DEFAULT_PARTITION__"):
        (tmp_path / f"hour={hour}").mkdir()
        write(log_table(), tmp_path / f"hour={hour}" / "part", "parquet")
    roles = "{label: y, numeric: {x: none}, categorical: [hour]}"
    for where, text in (("hour is None", ""), ("hour is not None", "1"), ("hour < 5", "1")):
        batches = list(reader_of(config_of(tmp_path, "parquet", f"where={where}", roles=roles)))
        assert {key for batch in batches for key in batch.sparse[:, 0].tolist()} == {hash_key(text)}, where


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("x >", "where: 'x >' cannot be read"),
        ("__import__('os')", "is not allowed there"),
        ("x + 1 > 2", r"where: 'x \+ 1' is not allowed there; allowed: comparisons of columns"),
        ("x in y", "where: 'y' is not allowed there"),
        ("1 < 2", "where: '1' is not allowed there"),
        ("f(x) == 1", "is not allowed there"),
        ("x", "where: 'x' is not allowed there"),
        ("x == 'a'", "data.where: 'a' cannot be compared with a column of type int64 of .*log.parquet"),
        ("c == 3", "data.where: 3 cannot be compared with a column of type string of .*log.parquet"),
        ("c < x", "data.where: it does not fit the columns of .*log.parquet: "),
        ("cc == 'a'", "data.where: no column 'cc' in .*log.parquet; nearest: c"),
    ],
)
def test_predicates_that_are_refused(tmp_path, where, message):
    path = write(log_table(), tmp_path / "log.parquet", "parquet")
    with pytest.raises(InvalidArgument, match=message):
        reader_of(config_of(path, "parquet", f"where={where}"))


def test_row_groups_that_statistics_exclude_are_not_read(tmp_path, monkeypatch):
    path = write(log_table(), tmp_path / "log.parquet", "parquet", 50)  # x ascends, so each has a range of its own
    groups: list[tuple[int, tuple[str, ...]]] = []
    original = pq.ParquetFile.read_row_group

    def counted(self, group, columns):
        groups.append((group, tuple(columns)))
        return original(self, group, columns=columns)

    monkeypatch.setattr(parquet.pq.ParquetFile, "read_row_group", counted)
    roles = "{label: y, numeric: {x: none}, categorical: [c]}"
    config = config_of(path, "parquet", "where=x >= 230 and x < 310", roles=roles)
    assert rows_of(reader_of(config)) == list(range(230, 310))
    assert [group for group, _ in groups] == [4, 5, 6]
    assert {names for _, names in groups} == {("y", "x", "c")}  # and no other column


def test_patterns_and_folders_by_url(tmp_path):
    table, memory = log_table(), fsspec.filesystem("memory")
    for number in range(4):
        path = write(table.slice(150 * number, 150), tmp_path / f"{number}.parquet", "parquet")
        memory.pipe_file(f"/logs/c=1/{number}.parquet", path.read_bytes())
    for train in ("memory://logs/c=1/*.parquet", "memory://logs", f"file://{tmp_path}/*.parquet", f"{tmp_path}/**"):
        assert rows_of(reader_of(config_of(train, "parquet"))) == list(range(ROWS)), train
    memory.pipe_file("/text/log.csv.gz", gzip.compress(write(table, tmp_path / "log", "csv").read_bytes()))
    assert rows_of(reader_of(config_of("memory://text/log.csv.gz", "csv"), shuffle=True)) != list(range(ROWS))
    for none in ("memory://logs/*.orc", "memory://elsewhere/x.parquet", "memory://nothing/"):
        with pytest.raises(NotFound, match=none.removeprefix("memory://").rstrip("/").replace("*", r"\*")):
            reader_of(config_of(none, "parquet"))


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with s3_server() as url:
        yield url


def test_data_on_s3(s3, tmp_path, monkeypatch):
    table = log_table()
    with s3_bucket(s3, monkeypatch) as bucket:
        store = fsspec.filesystem("s3")
        for form in (*FORMATS, "csv"):
            for number in range(2):
                path = write(table.slice(300 * number, 300), tmp_path / f"{form}{number}", form)
                store.put_file(str(path), f"{bucket}/{form}/n={number}/part")
            config = config_of(f"s3://{bucket}/{form}/*/part", form)
            assert rows_of(reader_of(config)) == list(range(ROWS)), form
        shuffled = reader_of(config_of(f"s3://{bucket}/csv", "csv"), shuffle=True, shuffle_rows=100)
        assert sorted(rows_of(shuffled)) == list(range(ROWS))
        with pytest.raises(NotFound, match=rf"s3://{bucket}/none/\*: no file has such a name"):
            reader_of(config_of(f"s3://{bucket}/none/*", "parquet"))


@pytest.mark.parametrize("form", FORMATS)
def test_columns_that_are_missing_or_of_another_type_are_named(tmp_path, form):
    path = write(log_table().drop_columns(["unused"]), tmp_path / f"log.{form}", form)
    for roles, message in (
        ("{label: yy, categorical: [c]}", rf"data.columns.label: no column 'yy' in .*log.{form}; nearest: y"),
        (
            "{label: y, categorical: [price]}",
            rf"features.price: no column 'price' in .*log.{form}; it has y, x, f, c, k",
        ),
        (
            "{label: y, numeric: {c: log}}",
            rf"features.c: column c of .*log.{form} is string; expected a number",
        ),
        (
            "{label: y, categorical: [f]}",
            rf"features.f: column f of .*log.{form} is double; expected a text or an int",
        ),
        ("{label: y, numeric: {y: log}}", "features.y: reads 'y', which is data.columns.label"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            reader_of(config_of(path, form, roles=roles))


@pytest.mark.parametrize("form", FORMATS)
def test_files_that_are_empty_cut_short_or_of_another_format(tmp_path, form):
    path = write(log_table(), tmp_path / f"log.{form}", form)
    config, whole = config_of(path, form), path.read_bytes()
    name = {"parquet": "Parquet", "orc": "ORC", "arrow": "Arrow"}.get(form, "JSON object")
    path.write_bytes(b"")
    with pytest.raises(InvalidArgument, match=rf"log.{form}: the file is empty; expected an? {name}"):
        reader_of(config)
    for damaged in (whole[: len(whole) // 2], b"not of this format, whatever the name says" * 9):
        path.write_bytes(damaged)
        with pytest.raises((DataLoss, InvalidArgument), match=rf"log.{form}"):
            list(reader_of(config))
    path.write_bytes(whole)
    reader = reader_of(config)
    write(log_table().slice(0, 500), path, form)
    with pytest.raises(DataLoss, match=rf"log.{form}: the .* (has changed|is damaged)"):
        list(reader)


@pytest.mark.parametrize("form", FORMATS)
def test_bad_rows_are_named_or_skipped_and_counted(tmp_path, form):
    table = log_table()
    labels = table.column("y").to_pylist()
    labels[17], labels[130] = 7, None
    table = table.set_column(1, "y", pa.array(labels, pa.int64()))
    floats = table.column("f").to_pylist()
    floats[420] = 1e39
    table = table.set_column(3, "f", pa.array(floats, pa.float64()))
    path = write(table, tmp_path / f"log.{form}", form)
    with pytest.raises(BadLine, match=rf"log.{form}, row 18, column y: '7' is not a label; expected '0' or '1'"):
        list(reader_of(config_of(path, form, roles="{label: y, numeric: {x: none}, categorical: [c]}")))
    for where in ((), ("where=x != 17 and x != 130 and x < 590",)):
        config = config_of(path, form, "on_bad_line=skip", *where)
        readers = [reader_of(config, rank=rank, world=2, shuffle=True, shuffle_rows=100) for rank in range(2)]
        parts = [list(reader) for reader in readers]
        assert len(parts[0]) == len(parts[1])
        good = [i for i in range(590 if where else ROWS) if i not in (17, 130, 420)]
        assert sorted(rows_of(batch for part in parts for batch in part)) == good
        assert sum(reader.bad_lines for reader in readers) == (1 if where else 3)
    with pytest.raises(BadLine, match=r"row 421, column f: it is 1e\+39, which is not finite as a float32 \(fea"):
        list(reader_of(config_of(path, form, "where=x > 400", roles="{label: y, numeric: {x: none, f: none}}")))


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_times_and_compressed_files_of_json_lines(tmp_path, suffix):
    rows = [{"y": i % 2, "x": i, "t": f"2024-01-{1 + i % 9:02}", "new": None} for i in range(50)]
    rows += [{"y": 1, "x": 50.5, "t": "never", "other": [1]}]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = tmp_path / f"log.jsonl{suffix}"
    packed = {"": text, ".gz": gzip.compress(text), ".zst": pa.compress(text, "zstd", asbytes=True)}
    path.write_bytes(packed[suffix])
    roles = "{label: y, numeric: {x: none}, categorical: [t, new]}"
    batches = list(reader_of(config_of(path, "jsonl", roles=roles), shuffle=True, shuffle_rows=20, batch_size=7))
    assert sorted(rows_of(batches)) == list(range(51))
    by_row = {int(d[0]): s.tolist() for batch in batches for d, s in zip(batch.dense, batch.sparse, strict=True)}
    assert by_row == {i: [hash_key(row["t"]), hash_key("")] for i, row in enumerate(rows)}


def test_json_lines_have_the_ids_of_63_bits_and_more(tmp_path):
    """Arrow takes such numbers for floats, which do not hold them exactly."""
    path = tmp_path / "log.jsonl"
    ids = [2**63, 5, 2**64 - 1, 2**63 + 1]
    lines = [json.dumps({"y": 1, "c": key, "s": [key, 1]}) for key in ids]
    path.write_text("\n".join([*lines[:2], "{broken", *lines[2:]]) + "\n")
    config = config_of(path, "jsonl", "on_bad_line=skip", roles="{label: y}")
    config.read_features((IdFeature("c"), SequenceFeature("s", max_len=4)))
    (batch,) = reader_of(config)
    assert batch.tensors["c"].tolist() == [hash_key(str(key)) for key in ids]
    assert batch.tensors["s"][0].tolist() == [hash_key(str(key)) for first in ids for key in (first, 1)]
    path.write_text("".join(json.dumps({"y": 1, "c": key}) + "\n" for key in (2**63, 1.5)))
    with pytest.raises(InvalidArgument, match=r"column c of .* is double; expected a text or an integer"):
        reader_of(config_of(path, "jsonl", roles="{label: y, categorical: [c]}"))


def test_json_lines_that_cannot_be_read_are_named_or_skipped(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(pa.compress(b'{"y": 1, "x": 2}\n' * 9, "zstd", asbytes=True))
    with pytest.raises(InvalidArgument, match=r"it is a zstd file, .* ends in .gz or .zst"):
        reader_of(config_of(path, "jsonl", roles="{label: y, numeric: {x: none}}"))
    lines = [json.dumps({"y": i % 2, "x": i, "c": f"c{i}"}) for i in range(100)]
    lines[40] = '{"y": 1, "x": "many"}'
    lines[41] = "{broken"
    lines[60] = ""
    path.write_text("\n".join(lines))
    roles = "{label: y, numeric: {x: none}, categorical: [c]}"
    with pytest.raises(BadLine, match=r"log.jsonl, line 41: '\{.*' cannot be read: "):
        list(reader_of(config_of(path, "jsonl", roles=roles)))
    for where in ((), ("where=x < 1000",)):
        reader = reader_of(config_of(path, "jsonl", "on_bad_line=skip", *where, roles=roles))
        assert rows_of(reader) == [i for i in range(100) if i not in (40, 41, 60)]
        assert reader.bad_lines == 2
        assert "line 41" in str(reader.first_bad_line)


def test_weights_of_json_lines_may_have_fractions_after_the_first_lines(tmp_path):
    """The first mebibyte gives the types, and its lists have integers alone; keys in lists stay integers."""
    path = tmp_path / "log.jsonl"
    rows = [{"y": i % 2, "s": [i, i + 1], "w": [1, 2], "day": ["2024-01-05"]} for i in range(30_000)]
    rows += [{"y": 1, "s": [7, 8], "w": [0.5, 2], "day": ["never"]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert path.stat().st_size > 1 << 20
    config = config_of(path, "jsonl", "on_bad_line=skip", roles="{label: y}")
    config.read_features((MultiHotFeature("s", weights="w"), SequenceFeature("day", max_len=2)))
    reader = reader_of(config, batch_size=len(rows))
    (batch,) = reader
    assert len(batch) == len(rows)
    keys, _, weights = batch.tensors["s"]
    assert weights.tolist()[-2:] == [0.5, 2.0]
    assert keys.tolist()[-2:] == [hash_key("7"), hash_key("8")]
    assert batch.tensors["day"][0].tolist()[-1] == hash_key("never")
