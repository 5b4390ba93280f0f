"""``bench reader``: reads Parquet with features up to the model's tensors, beside pyarrow's scan of the same columns.

The file has Criteo's layout: a label, 13 integers and 26 columns of texts by a Zipf law, of up to a million texts each,
dictionary-encoded, zstd, in row groups of 131,072 rows. The features take a logarithm of each number and hash each
text. Both sides have one CPU and one decoding thread, and take turns; the scan gives Arrow buffers, as texts or as
codes and a dictionary, and the faster of the two is the reference. The same rows as Criteo's TSV are read as well.
Then a model is trained on the file (``reader_wait.py``), with all CPUs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from ...proto.config.job import JobConfig
from ...proto.options.document import validate
from ...worker.data import ReadOptions
from ...worker.data.sources import fit_features, open_reader
from .harness import Figure, median, pinned_to_one_cpu
from .reader_wait import measure_wait

_NUMBERS, _TEXTS = 13, 26
_GROUP = 131_072
_BATCH = 4096
LIMIT_OF_SCAN = 0.5


@dataclass(frozen=True)
class Size:
    """The number of rows of the file, and how often it is read by each contender and trained on."""

    rows: int
    turns: int
    trainings: int


FULL = Size(rows=4 * _GROUP, turns=5, trainings=3)
QUICK = Size(rows=20_000, turns=2, trainings=1)


def run_reader(size: Size) -> list[Figure]:
    """Returns all figures; see the docstring of the module."""
    with tempfile.TemporaryDirectory(prefix="sparserow-") as folder:
        table, parquet = _made(size.rows), Path(folder) / "clicks.parquet"
        pq.write_table(table, parquet, row_group_size=min(_GROUP, size.rows // 4), compression="zstd")
        figures = _speeds(size, table, parquet)
        job = _job(parquet, with_features=True)
        return [
            *figures,
            *measure_wait(job, min(_BATCH, size.rows // 20), rows=min(size.rows, 100_000), turns=size.trainings),
        ]


def _speeds(size: Size, table: pa.Table, parquet: Path) -> list[Figure]:
    text = parquet.with_name("clicks.tsv")
    with pinned_to_one_cpu():
        options = pa_csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
        pa_csv.write_csv(table, text, options)
        texts = [name for name in table.schema.names if name.startswith("C")]
        runs: dict[str, Callable[[], int]] = {
            "scan to texts": lambda: _scan(parquet, table.schema.names, []),
            "scan to codes": lambda: _scan(parquet, table.schema.names, texts),
            "features": _reading(_job(parquet, with_features=True)),
            "text": _reading(_job(text, with_features=False)),
        }
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(size.turns + 1):
            for name, run in runs.items():
                began = perf_counter()
                rows = run()
                if rows != size.rows:
                    raise AssertionError(f"bench reader: {name} gave {rows} rows of {size.rows}")
                if turn:
                    seconds[name].append(perf_counter() - began)
    rates = {name: size.rows / median(values) / 1e6 for name, values in seconds.items()}
    unit, what = "M rows/s", f"{_NUMBERS} numbers and {_TEXTS} texts of {size.rows} rows"
    scan = max(rates["scan to texts"], rates["scan to codes"])
    of_scan, of_text = rates["features"] / scan, rates["features"] / rates["text"]
    return [
        Figure(f"pyarrow's scan to texts, {what}", rates["scan to texts"], unit),
        Figure(f"pyarrow's scan to codes, {what}", rates["scan to codes"], unit),
        Figure("reader with features, of the faster scan", rates["features"], unit, LIMIT_OF_SCAN, of_scan),
        Figure("reader of the same rows as text", rates["text"], unit),
        Figure("reader with features, of the reader of text", rates["features"], unit, ratio=of_text),
    ]


def _made(rows: int) -> pa.Table:
    draw = np.random.default_rng(7)
    columns: dict[str, pa.Array] = {"label": pa.array(draw.integers(0, 2, rows).astype(np.int8))}
    for number in range(_NUMBERS):
        columns[f"I{number + 1}"] = pa.array(draw.integers(0, 10_000, rows), mask=draw.random(rows) < 0.1)
    for number in range(_TEXTS):
        distinct = (100, 1_000, 10_000, 100_000, 1_000_000)[number % 5]
        codes = np.minimum(draw.zipf(1.2, rows), distinct) + number * 1_000_003
        columns[f"C{number + 1}"] = pa.array(np.char.mod("%08x", codes))
    return pa.table(columns)


def _job(path: Path, *, with_features: bool) -> JobConfig:
    document: dict[str, object] = {"model": {"class": "DLRM"}}
    if with_features:
        document["data"] = {"format": "parquet", "columns": {"label": "label"}}
        numbers = {f"I{number + 1}": {"kind": "dense", "log1p": True} for number in range(_NUMBERS)}
        document["features"] = numbers | {f"C{number + 1}": {"kind": "id"} for number in range(_TEXTS)}
    else:
        document["data"] = {"format": "criteo"}
    document["data"] = {**document["data"], "train": str(path), "test": str(path), "shuffle_rows": 0}  # type: ignore[dict-item]
    return validate(JobConfig, document)


def _reading(job: JobConfig) -> Callable[[], int]:
    features = fit_features(job.data)
    reader = open_reader(job.data, "train", features, ReadOptions(batch_size=_BATCH))
    return lambda: sum(len(batch) for batch in reader)


def _scan(path: Path, columns: list[str], as_codes: list[str]) -> int:
    file = pq.ParquetFile(path, read_dictionary=as_codes)
    return sum(
        file.read_row_group(group, columns=columns, use_threads=False).num_rows
        for group in range(file.metadata.num_row_groups)
    )
