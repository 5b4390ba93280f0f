"""Reads files that may be crafted, as training and ``sparserow predict`` do; run as a process of its own.

``hostile_files.py read FORMAT PATH`` reads one file, and writes a line of JSON: what each way ended with, and by how
much the process grew. ``hostile_files.py mutate FORMAT FOLDER FIRST LAST`` reads files that differ from a good one by
the changes of the seeds in [FIRST, LAST), and writes each seed before it is read.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.orc
import pyarrow.parquet

from sparserow.deploy.commands.predict import _source_of
from sparserow.proto.config.data_config import DataConfig
from sparserow.proto.errors import SparserowError
from sparserow.proto.features.kinds import IdFeature, MultiHotFeature, NumericFeature
from sparserow.proto.options.document import load_config
from sparserow.serving.inference.column_files import read_columns
from sparserow.worker.data import ReadOptions
from sparserow.worker.data.sources import fit_features, open_reader
from sparserow.worker.data.sources.feature_columns import feature_set

FEATURES = (
    NumericFeature("f"),
    IdFeature("c"),
    IdFeature("k"),
    IdFeature("d"),
    MultiHotFeature("s", weights="w"),
)
SUFFIXES = {"parquet": ".parquet", "orc": ".orc", "arrow": ".arrow", "jsonl": ".jsonl", "csv": ".csv"}
ROWS = 200
_LONGEST_SEC = 60  # a file of some kilobytes that takes longer ends the process
_ROOM_BYTES = 4 << 30


def good_table() -> pa.Table:
    """A small log with a column of each kind."""
    draw = np.random.default_rng(3)
    words = [None if at % 9 == 0 else f"word {at % 17}" for at in range(ROWS)]
    return pa.table(
        {
            "y": pa.array(draw.integers(0, 2, ROWS)),
            "f": pa.array(draw.normal(size=ROWS), mask=draw.random(ROWS) < 0.1),
            "c": pa.array(words),
            "k": pa.array(draw.integers(-5, 5, ROWS)),
            "d": pa.array(words).dictionary_encode(),
            "s": pa.array([[f"s{at % 5}"] * (at % 4) for at in range(ROWS)]),
            "w": pa.array([[0.5] * (at % 4) for at in range(ROWS)]),
            "unread": pa.array([{"a": [at], "b": None} for at in range(ROWS)]),
        }
    )


def write_good(path: Path, form: str, *, compressed: bool) -> None:
    """Writes the small log in several parts."""
    table = good_table()
    if form == "parquet":
        pa.parquet.write_table(table, path, row_group_size=70, compression="zstd" if compressed else "none")
    elif form == "orc":
        plain = table.drop_columns(["d", "unread"]).append_column("d", table["c"])
        pa.orc.write_table(plain, str(path), compression="zstd" if compressed else "uncompressed")
    elif form == "arrow":
        options = pa.ipc.IpcWriteOptions(compression="zstd" if compressed else None)
        with pa.ipc.new_file(str(path), table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=70)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


def train(path: Path, form: str) -> int:
    """Reads a file as a job does; returns the number of samples."""
    config = load_config(DataConfig, None, [f"train={path}", f"test={path}", f"format={form}", "columns={label: y}"])
    config.read_features(FEATURES)
    reader = open_reader(config, "train", fit_features(config), ReadOptions(batch_size=64))
    return sum(len(batch) for batch in reader)


def predict(path: Path, form: str) -> int:
    """Reads a file as ``sparserow predict`` does; returns the number of rows."""
    features = feature_set(FEATURES)
    rows = 0
    for columns in read_columns(path, _source_of(path, features, {}), features, 1024):
        rows += len(columns)
        features(columns, "predict")
    return rows


def ended(read: Callable[[Path, str], int], path: Path, form: str) -> str:
    """Returns what a way of reading ended with: rows, an error of the taxonomy, or another one after "!"."""
    try:
        return f"rows: {read(path, form)}"
    except SparserowError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        traceback.print_exc()
        return f"!{type(error).__name__}: {error}"


def peak_bytes() -> int:
    """Returns the peak of resident memory since the process began, or since it was last set back."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def read_one(form: str, path: Path) -> None:
    """Reads a file, and writes what was found."""
    good = path.with_name("good" + SUFFIXES[form])
    if form != "csv":  # what is imported and allocated once is no matter of the file
        write_good(good, form, compressed=True)
        assert ended(train, good, form) == ended(predict, good, form) == f"rows: {ROWS}"
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    ways = (predict,) if form == "csv" else (train, predict)
    found: dict[str, Any] = {way.__name__: ended(way, path, form) for way in ways}
    print(json.dumps({**found, "grown_bytes": peak_bytes() - before}), flush=True)


def mutated(data: bytes, seed: int) -> bytes:
    """Returns bytes with some changes: bytes, words of extreme values, cuts, copies; more of them at the end."""
    draw = random.Random(seed)
    made = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        tail = draw.random() < 0.4
        at = draw.randrange(max(0, len(made) - 1500), len(made)) if tail else draw.randrange(len(made))
        kind = draw.randrange(6)
        if kind <= 1:
            made[at] = draw.randrange(256)
        elif kind == 2:
            made[at] ^= 1 << draw.randrange(8)
        elif kind == 3:
            width = draw.choice((1, 2, 4, 8))
            value = draw.choice((0, 1, (1 << (8 * width)) - 1, (1 << (8 * width - 1)) - 1, 1 << (8 * width - 1)))
            made[at : at + width] = value.to_bytes(width, "little")
        elif kind == 4:
            begin, size = draw.randrange(len(made)), draw.randrange(1, 64)
            made[at : at + size] = made[begin : begin + size]
        elif draw.random() < 0.2:
            del made[at : at + draw.randrange(1, 64)]
    return bytes(made) or b"\0"


def read_mutated(form: str, folder: Path, first: int, last: int) -> None:
    """Reads files that differ from a good one."""
    goods = []
    for compressed in (False, True):
        write_good(folder / "good", form, compressed=compressed)
        goods.append((folder / "good").read_bytes())
    resource.setrlimit(resource.RLIMIT_AS, (_size_bytes() + _ROOM_BYTES, resource.RLIM_INFINITY))
    path = folder / f"mutated{SUFFIXES[form]}"
    found: Counter[str] = Counter()
    for seed in range(first, last):
        print(f"seed {seed}", flush=True)
        signal.alarm(_LONGEST_SEC)
        path.write_bytes(mutated(goods[seed % 2], seed))
        for way in (train, predict):
            found[f"{way.__name__} {ended(way, path, form).partition(':')[0]}"] += 1
    print(json.dumps(found), flush=True)


def _size_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main() -> None:
    """Does what the arguments say."""
    if sys.argv[1] == "read":
        read_one(sys.argv[2], Path(sys.argv[3]))
    else:
        read_mutated(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))


if __name__ == "__main__":
    main()
