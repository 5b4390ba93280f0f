"""Numbers, keys and quantile buckets are what they are documented to be, bit for bit, in text and in Parquet."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet
import pytest
import xxhash

from column_uses import data_of
from sparserow.proto.config.criteo_columns import CRITEO_CATEGORICAL, CRITEO_NUMERIC
from sparserow.worker.data import ReadOptions
from sparserow.worker.data.sources import fit_features, open_reader

Floats = npt.NDArray[np.float64]
NUMERIC = {"a": "log_standardize", "b": "standardize", "c": "log", "d": "none"}
BUCKETS = {"a": 8, "b": 64, "d": 3}
COLUMNS = ("y", "a", "b", "c", "d", "unit price", "v")
TEXTS = ("unit price", "v")
ROLES = f"label: y, numeric: {NUMERIC}, categorical: {list(TEXTS)}, buckets: {BUCKETS}".replace("'", "")


def literal_numbers(cells: list[str]) -> Floats:
    return np.array([float("nan") if cell in ("", "?") else float(cell) for cell in cells])


def literal_dense(values: Floats, transform: str) -> npt.NDArray[np.float32]:
    """By the words of docs/data-formats.md; the sums are numpy's."""
    if transform.startswith("log"):
        values = np.sign(values) * np.log1p(np.abs(values))
    if transform.endswith("standardize"):
        present = values[~np.isnan(values)]
        mean = present.mean() * len(present) / len(present)  # as Chan's formula adds these values to none
        values = (values - mean) / np.sqrt(np.square(present - mean).sum() / len(present))
    return np.where(np.isnan(values), 0, values).astype(np.float32)


def literal_buckets(values: Floats, buckets: int) -> list[int]:
    present = np.sort(values[~np.isnan(values)])
    if len(set(present)) <= buckets:
        edges = sorted(set(present))[1:]
    else:
        edges = sorted({np.quantile(present, at / buckets, method="higher") for at in range(1, buckets)})
    return [buckets if np.isnan(value) else sum(edge <= value for edge in edges) for value in values]


def literal_keys(cells: list[str]) -> list[int]:
    return [xxhash.xxh3_64_intdigest(b"" if cell == "?" else cell.encode()) >> 1 for cell in cells]


def same(found: object, wanted: object, name: str) -> None:
    """The same bits, but for the sign of a zero."""
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted), err_msg=name)


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_columns_by_use(tmp_path: Path, form: str) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)

    def number() -> str:
        return draw.choice(["", "?", "-2.5", "1e3", f"{draw.gauss(0, 50):.3f}", str(draw.randrange(100))])

    ends = [[draw.choice(["p", "", "?", "é", str(at)]), draw.choice("xy")] for at in range(3000)]
    rows = [[draw.choice("01"), number(), number(), number(), draw.choice(["", *"1234"]), *end] for end in ends]
    cells = {name: [row[at] for row in rows] for at, name in enumerate(COLUMNS)}
    path = tmp_path / f"log.{form}"
    if form == "csv":
        with path.open("w", newline="") as file:
            csv.writer(file, delimiter=";").writerows(rows)
        schema = f"csv={{columns: {list(COLUMNS)}, delimiter: ;, missing: ['?'], {ROLES}}}"
    else:
        columns = {name: pa.array(literal_numbers(cells[name])) for name in NUMERIC}
        texts = {name: [None if cell in ("", "?") else cell for cell in cells[name]] for name in ("y", *TEXTS)}
        pa.parquet.write_table(pa.table(columns | texts), path)
        schema = f"columns={{{ROLES}}}"
    config = data_of(f"train={path}", f"test={path}", f"format={form}", schema)
    fitted = fit_features(config)
    assert fitted.spec.names.dense == tuple(NUMERIC)
    assert fitted.spec.names.sparse == ("unit_price", "v", *(f"{name}_bucket" for name in BUCKETS))
    (batch,) = open_reader(config, "train", fitted, ReadOptions(batch_size=3000))
    same(batch.labels, literal_numbers(cells["y"]), "labels")
    for at, (name, transform) in enumerate(NUMERIC.items()):
        same(batch.dense[:, at], literal_dense(literal_numbers(cells[name]), transform), name)
    for at, name in enumerate(TEXTS):
        same(batch.sparse[:, at], literal_keys(cells[name]), name)
    for at, (name, count) in enumerate(BUCKETS.items(), start=len(TEXTS)):
        same(batch.sparse[:, at], literal_buckets(literal_numbers(cells[name]), count), f"{name} in {count}")


@pytest.mark.parametrize("has_header", [False, True])
def test_columns_of_criteo(tmp_path: Path, has_header: bool) -> None:
    draw = random.Random(5)
    names = ["label", *CRITEO_NUMERIC, *CRITEO_CATEGORICAL]
    if has_header:
        draw.shuffle(names)
    rows = [
        {
            name: draw.choice("01")
            if name == "label"
            else draw.choice(["", str(draw.randrange(-3, 5000)) if name[0] == "I" else f"{draw.randrange(2**32):x}"])
            for name in names
        }
        for _ in range(700)
    ]
    path = tmp_path / "clicks"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, delimiter="," if has_header else "\t", lineterminator="\n")
        if has_header:
            writer.writeheader()
        writer.writerows(rows)
    config = data_of(f"train={path}", f"test={path}")
    (batch,) = open_reader(config, "train", fit_features(config), ReadOptions(batch_size=700))
    for at, name in enumerate(CRITEO_NUMERIC):
        wanted = literal_dense(literal_numbers([row[name] for row in rows]), "log")
        same(batch.dense[:, at], wanted, name)
    for at, name in enumerate(CRITEO_CATEGORICAL):
        same(batch.sparse[:, at], literal_keys([row[name] for row in rows]), name)


def test_quantiles_beyond_the_sample_depend_on_the_order_of_buckets(tmp_path: Path) -> None:
    """The sample of 200,000 values is drawn by the number of the column among the buckets."""
    draw = np.random.default_rng(3)
    values = draw.integers(0, 1 << 20, (260_000, 2))
    path = tmp_path / "log.csv"
    path.write_text("".join(f"1,{first},{second}\n" for first, second in values.tolist()))
    schema = "csv={columns: [y, a, b], label: y, numeric: {a: log}, buckets: {a: 4, b: 4}}"
    config = data_of(f"train={path}", f"test={path}", "format=csv", schema)
    edges = fit_features(config).statistics
    assert edges["a_bucket"] == (262006, 523244, 785357)
    assert edges["b_bucket"] == (262576, 525997, 787509)
