"""Features of text: a job over CSV or Criteo's layout has the same inputs as one over Parquet, and clear errors."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import sparserow as sr
from sparserow.proto.config.job import JobConfig
from sparserow.proto.options.document import load_config
from sparserow.worker.data import BadLine, Batch, ReadOptions
from sparserow.worker.data.sources import fit_features, lines, open_reader

ROWS = 1200
FEATURES = """
  price: {kind: dense, log1p: true, scale: standardize}
  age: {kind: dense, scale: min_max, clip: [0, 80], default: 0.5}
  age_text: {kind: id, column: age}
  user: {kind: id}
  item: {kind: id, modulo: 1000, default: none}
  price_bucket: {kind: bucketize, column: price, quantiles: 16}
  age_bucket: {kind: bucketize, column: age, boundaries: [20, 40, 60]}
  user_country: {kind: cross, of: [user, country]}
  country: {kind: id, vocabulary: VOCABULARY, unknown: {hash: 3}}
  hour: {kind: time, column: at, zone: Europe/Berlin}
  tags: {kind: multi_hot, weights: tag_weights, max_len: 5}
  words: {kind: sequence, max_len: 3}
  path: {kind: split, delimiter: /, max_len: 2}
"""
ROLES = "labels: {click: {}, stars: {dtype: float32}}, sample_weight: weight, group: user"
TASKS = "tasks: {click: {}, stars: {loss: mse}}"


def samples(rows: int, seed: int) -> pa.Table:
    draw = random.Random(seed)

    def some(value: Any) -> Any:
        return None if draw.random() < 0.1 else value

    lists = [[draw.choice("abcdef") for _ in range(draw.randrange(6))] for _ in range(rows)]
    return pa.table(
        {
            "click": [draw.randrange(2) for _ in range(rows)],
            "stars": [draw.randrange(50) / 8 for _ in range(rows)],
            "weight": [draw.randrange(1, 9) / 4 for _ in range(rows)],
            "price": pa.array([some(draw.randrange(1 << 20) / 64) for _ in range(rows)], pa.float64()),
            "age": pa.array([some(draw.randrange(100)) for _ in range(rows)], pa.int64()),
            "user": [some(f"u {draw.randrange(99)}") for _ in range(rows)],
            "item": [some(draw.randrange(1 << 40)) for _ in range(rows)],
            "country": [some(draw.choice(["DE", "FR", "US", "XX", "ÅL"])) for _ in range(rows)],
            "at": [some(f"2024-0{draw.randrange(1, 9)}-15T{draw.randrange(24):02}:05:00") for _ in range(rows)],
            "tags": [each or None for each in lists],
            "tag_weights": [[draw.randrange(8) / 4 for _ in each] or None for each in lists],
            "words": [some([draw.choice("pqrs") for _ in range(draw.randrange(1, 9))]) for _ in range(rows)],
            "path": [some("/".join(draw.choice("xyz") for _ in range(draw.randrange(1, 6)))) for _ in range(rows)],
        }
    )


def text_of(table: pa.Table) -> str:
    """The rows as lines with a header, in another order of columns."""

    def cell(value: Any) -> str:
        if isinstance(value, list):
            return "|".join(cell(each) for each in value)
        return "" if value is None else str(value)

    names = sorted(table.column_names)
    rows = [names, *([cell(row[name]) for name in names] for row in table.to_pylist())]
    return "".join(";".join(row) + "\n" for row in rows)


def job_of(folder: Path, form: str, *sets: str, features: str = FEATURES) -> JobConfig:
    section = f"csv: {{header: true, delimiter: ;, {ROLES}}}" if form == "csv" else f"columns: {{{ROLES}}}"
    (folder / "countries.txt").write_text("DE\nÅL\n")
    path = folder / "job.yaml"
    path.write_text(
        f"data: {{format: {form}, train: '{folder}/*.{form}', test: '{folder}/*.{form}', {section}}}\n"
        f"features:{features.replace('VOCABULARY', str(folder / 'countries.txt'))}{TASKS}\n"
        "model: {class: 'any:Model'}\n"
    )
    return load_config(JobConfig, path, list(sets))


def reader_of(job: JobConfig, **options: Any) -> Any:
    return open_reader(job.data, "train", fit_features(job.data), ReadOptions(**{"batch_size": 100, **options}))


def arrays_of(batches: list[Batch]) -> dict[str, Any]:
    """The samples of batches as plain lists, by name."""
    found: dict[str, list[Any]] = {}
    for batch in batches:
        plain = {"labels": batch.labels.tolist(), "weights": batch.weights, "groups": batch.groups}
        for name, values in (plain | batch.tensors).items():
            if isinstance(values, tuple):
                keys, offsets, *weights = values
                ends = list(zip(offsets.tolist(), offsets.tolist()[1:], strict=False))
                values = [[part[a:b].tolist() for part in (keys, *weights)] for a, b in ends]
            elif not isinstance(values, list):
                values = values.tolist()
            found.setdefault(name, []).extend(values)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same samples as a Parquet file, and as three CSV files."""
    made = tmp_path_factory.mktemp("text")
    table = samples(ROWS, 1)
    pa.parquet.write_table(table, made / "log.parquet", row_group_size=333)
    for at, (begin, end) in enumerate(((0, 100), (100, 101), (101, ROWS))):
        (made / f"log{at}.csv").write_text(text_of(table.slice(begin, end - begin)))
    return made


def test_text_and_parquet_have_the_same_inputs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "read_runs", short_runs)
    text, parquet = (job_of(folder, form) for form in ("csv", "parquet"))
    found, wanted = (arrays_of(list(reader_of(job))) for job in (text, parquet))
    assert set(wanted) == {"labels", "weights", "groups", *text.features}
    for name, values in wanted.items():
        if name in (
            "price",
            "price_bucket",
        ):  # parts of other sizes: the sums for mean and std differ in their last bit
            np.testing.assert_allclose(found[name], values, rtol=1e-6, err_msg=name)
        else:
            assert found[name] == values, name


def short_runs(path: str, begin: Any = None, run_bytes: int = 0) -> Any:
    return ORIGINAL_RUNS(path, begin, 5_000)


ORIGINAL_RUNS = lines.read_runs


def test_a_position_in_text_goes_on_with_other_workers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(2**16)
    print("seed", seed)
    monkeypatch.setattr(lines, "read_runs", short_runs)
    job = job_of(folder, "csv")
    whole = arrays_of(list(reader_of(job)))
    options = {"shuffle": True, "shuffle_rows": 128, "seed": seed, "batch_size": 32}
    first = [reader_of(job, rank=rank, world=2, **options) for rank in range(2)]
    passes = [iter(reader) for reader in first]
    taken = [next(each) for _ in range(random.Random(seed).randrange(1, 12)) for each in passes]
    states = [json.loads(json.dumps(reader.state_dict())) for reader in first]
    for rank in range(3):
        reader = reader_of(job, rank=rank, world=3, **options)
        reader.load_state_dicts(states)
        taken += list(reader)
    found = arrays_of(taken)
    assert sorted(map(str, rows_of(found))) == sorted(map(str, rows_of(whole)))


def rows_of(found: dict[str, Any]) -> list[Any]:
    return list(zip(*(found[name] for name in sorted(found)), strict=True))


BROKEN = {
    "price": ("x1", r"line 3, column price: 'x1' is not a number; expected a finite float32 or nothing"),
    "stars": ("", r"line 3, column stars: null is not a label; expected a finite number"),
    "click": ("2", r"line 3, column click: '2' is not a label; expected '0' or '1'"),
    "weight": ("-1", r"line 3, column weight: '-1.0' is not a weight; expected a finite number >= 0"),
    "at": ("noon", r"line 3, column at: it is no timestamp: 'noon' \(feature hour\)"),
    "tag_weights": ("1|x|2", r"line 3, column tag_weights: 'x' is not a number"),
    "tags": ("a|b|c|d|e|f", r"line 3, column tags: it has 6 keys; allowed: at most 5 \(max_len\) \(feature tags\)"),
    "words": ("", r"line 3, column words: it is null, which on_null refuses \(feature words\)"),
}


@pytest.mark.parametrize("column", BROKEN)
def test_a_malformed_cell_is_named_or_skipped(tmp_path: Path, column: str) -> None:
    cell, message = BROKEN[column]
    table = samples(300, 2)
    if column == "words":
        table = table.set_column(11, "words", pa.array([["p"]] * 300))
    rows = text_of(table).splitlines()
    at = rows[0].split(";").index(column)
    for number in (2, 250):
        fields = rows[number].split(";")
        fields[at] = cell
        if column == "tags":
            fields[rows[0].split(";").index("tag_weights")] = "|".join("1" * 6)
        rows[number] = ";".join(fields)
    (tmp_path / "log.csv").write_text("\n".join(rows) + "\n")
    features = FEATURES.replace("words: {kind: sequence,", "words: {kind: sequence, on_null: refuse,")
    features = features if column == "words" else FEATURES
    with pytest.raises(BadLine, match=message) as caught:
        list(reader_of(job_of(tmp_path, "csv", features=features)))
    assert caught.value.unit == "line"
    reader = reader_of(job_of(tmp_path, "csv", "data.on_bad_line=skip", features=features))
    assert sum(len(batch) for batch in reader) == 298
    assert reader.bad_lines == 2
    assert reader.first_bad_line.line == 3


def test_a_file_without_a_column_is_refused_though_bad_lines_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(
        text_of(
            samples(9, 3).rename_columns([name if name != "price" else "prize" for name in samples(1, 3).column_names])
        )
    )
    with pytest.raises(
        sr.errors.InvalidArgument, match=r"features\.price: no column 'price' in .*log\.csv; nearest: prize"
    ):
        fit_features(job_of(tmp_path, "csv", "data.on_bad_line=skip").data)
    pa.parquet.write_table(samples(9, 3).set_column(3, "price", pa.array(["x"] * 9)), tmp_path / "log.parquet")
    with pytest.raises(
        sr.errors.InvalidArgument, match=r"features\.price: column price of .* is string; expected a number"
    ):
        fit_features(job_of(tmp_path, "parquet", "data.on_bad_line=skip").data)


def criteo_job(path: Path, features: str, *sets: str) -> JobConfig:
    document = [
        f"data.train={path}",
        f"data.test={path}",
        f"features={{{features}}}",
        "model={class: DLRM, args: {rows: {'*': 100}}, min_rows: 1}",
    ]
    return load_config(JobConfig, None, [*document, *sets])


def test_criteo_with_features(tmp_path: Path) -> None:
    path = tmp_path / "clicks.tsv"
    fields = [["1", *map(str, range(13)), *(f"{at:x}" for at in range(26))], ["0", *[""] * 39]]
    path.write_text("".join("\t".join(row) + "\n" for row in fields))
    features = "I2: {kind: dense}, cut: {kind: bucketize, column: I5, boundaries: [2, 9]}, C7: {kind: id}, "
    features += "two: {kind: cross, of: [C1, I3]}"
    (batch,) = reader_of(criteo_job(path, features))
    assert batch.dense.tolist() == [[1], [0]]
    assert batch.labels.tolist() == [1, 0]
    assert batch.sparse.tolist() == [
        [1, sr.hash_key("6"), sr.hash_key(("0", "2"))],
        [3, sr.hash_key(""), sr.hash_key(("", ""))],
    ]
    with pytest.raises(sr.errors.InvalidArgument, match=r"features\.I14: no column 'I14' in .*; nearest: I"):
        fit_features(criteo_job(path, "I14: {kind: dense}, C1: {kind: id}").data)
    path.write_text(path.read_text().replace("\t6\t", "\t6g\t"))
    with pytest.raises(BadLine, match=r"line 1, column C7: '6g' is not 1-8 hexadecimal digits"):
        list(reader_of(criteo_job(path, features)))


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["features={}"], "features: are needed with data.format csv; allowed: a mapping of sections"),
        (["features.stars={kind: dense}"], "features.stars: reads 'stars', which is data.csv.labels.stars"),
        (["data.csv.label=click"], "label: exactly one of label and labels is needed"),
        (["data.csv.list_delimiter=;"], "list_delimiter: is that of the fields of a line"),
        (["data.csv.sample_weight=click"], "column click has two roles"),
        (["features.tags={kind: id}", "features.words={kind: id}", "data.csv.list_delimiter=' '"],
         r"data\.csv\.list_delimiter: has no effect without a feature of kind multi_hot or sequence"),
        (["tasks={click: {}}"], r"data\.csv\.labels\.stars: has no effect, as no task has this label"),
        (["metrics.max_groups=5", "data.csv.group=null"], r"metrics\.max_groups: needs a group of data\.csv or"),
    ],
)  # fmt: skip
def test_wrong_sections_are_named(folder: Path, sets: list[str], message: str) -> None:
    with pytest.raises(sr.errors.InvalidArgument, match=message):
        job_of(folder, "csv", *sets)


def test_criteo_has_no_lists(tmp_path: Path) -> None:
    with pytest.raises(
        sr.errors.InvalidArgument, match=r"features\.C1: reads lists, which data\.format criteo does not have"
    ):
        criteo_job(tmp_path / "x", "C1: {kind: sequence}", "model={class: 'any:Model'}")
    with pytest.raises(
        sr.errors.InvalidArgument, match=r"features\.label: reads 'label', which is data\.format criteo\.label"
    ):
        criteo_job(tmp_path / "x", "label: {kind: id}")
