"""Crafted files of samples, each read by a process of its own: it ends by itself, with an error that names the file.

SPARSEROW_TEST_FULL=1 reads more damaged files; SPARSEROW_TEST_SEED=N begins at another seed. A failure prints the seed.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hostile_files import ROWS, good_table
from long_form import FULL

SCRIPT = Path(__file__).parents[1] / "support" / "hostile_files.py"
MIB = 1 << 20
GOOD = {"y": 1, "f": 0.5, "c": "a", "k": 3, "d": "b", "s": ["t"], "w": [1.0]}
MUTATED = 20_000 if FULL else 200  # files of each format
FIRST_SEED = int(os.environ.get("SPARSEROW_TEST_SEED", "0"))


def read(form: str, path: Path) -> dict[str, Any]:
    """What a process found that read the file: how training and prediction ended, and by how much it grew."""
    command = [sys.executable, str(SCRIPT), "read", form, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, f"{path}: the process ended with {done.returncode}\n{done.stderr}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check_refused(form: str, path: Path, words: str, grown: int = 64 * MIB) -> None:
    found = read(form, path)
    for way in [way for way in ("train", "predict") if way in found]:
        assert re.match(r"(DataLoss|InvalidArgument|BadLine): ", found[way]), found
        assert str(path) in found[way], found
        assert re.search(words, found[way]), found
    assert found["grown_bytes"] < grown, found


def check_read(form: str, path: Path, rows: int) -> None:
    found = read(form, path)
    assert found.pop("grown_bytes") < 128 * MIB, found
    assert set(found.values()) == {f"rows: {rows}"}, found


def line(**changes: str) -> bytes:
    """A line of JSON of which some values are other texts, without a look at them."""
    texts = {**{name: json.dumps(value) for name, value in GOOD.items()}, **changes}
    return ("{" + ", ".join(f'"{name}": {text}' for name, text in texts.items()) + "}\n").encode()


DEEP = "[" * 20_000 + "]" * 20_000
DEEP_OBJECT = '{"a": ' * 5_000 + "1" + "}" * 5_000
WIDE = ", ".join(f'"n{at}": 1' for at in range(100_000))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (line(f=DEEP), "line 1: .* cannot be read: it is nested too deep"),
        (line(f=DEEP_OBJECT), "line 1: .* cannot be read: it is nested too deep"),
        (line() + line(f=DEEP), "line 2: .* cannot be read: "),
        (line() + line(c=DEEP_OBJECT), "line 2: .* cannot be read: "),
        (line(f="[" * 300 + "]" * 300), "column f is nested too deep; allowed: 8 levels"),
        (line(f="{" + WIDE + "}"), "column f has objects of 100000 fields; allowed: at most 64"),
        (
            b"".join(line(f=f'{{"n{at}": 1}}') for at in range(10_000)),
            "column f has objects of .* fields; allowed: at most 64",
        ),
        (("[" * 40_000).encode(), "line 1: .* cannot be read: "),
        (b"null\n" + line(), "line 1: 'null' cannot be read: it is no object"),
        (line() + b"null\n", "line 2: 'null' cannot be read: it is no object"),
    ],
)
def test_json_lines_that_are_deep_wide_or_no_objects_are_refused(text: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "crafted.jsonl"
    path.write_bytes(text)
    check_refused("jsonl", path, words)


@pytest.mark.parametrize(
    "lines",
    [
        [line(), line(z=DEEP), line(z=DEEP_OBJECT)],
        [line(z="{" + WIDE + "}")],
        [line().replace(b"}", f", {WIDE}}}".encode())],
        [line(**{f"n{at}": "1"}) for at in range(10_000)],
        [line(), line(z='"' + "[{" * 20_000 + '"')],
    ],
    ids=["deep", "wide value", "wide line", "names of lines", "brackets in a text"],
)
def test_columns_of_json_lines_that_no_job_reads_cost_nothing(lines: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "crafted.jsonl"
    path.write_bytes(b"".join(lines))
    check_read("jsonl", path, len(lines))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_one_line_that_inflates_to_gigabytes_is_refused(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"crafted.jsonl{suffix}"
    block = b" " * (64 * MIB)
    pack = gzip.compress if suffix == ".gz" else lambda data: pa.compress(data, "zstd", asbytes=True)
    path.write_bytes(pack(line()) + pack(b'{"f": ') + pack(block) * 32)
    found = read("jsonl", path)
    assert "line is longer than 1048576 bytes" in found["train"], found
    assert found["grown_bytes"] < 64 * MIB, found


def test_a_header_of_a_mebibyte(tmp_path: Path) -> None:
    path = tmp_path / "crafted.csv"
    names = ",".join(f"{at:x}" for at in range(180_000))
    path.write_text(f"{names}\n{names}\n")
    check_refused("csv", path, "there is no column", grown=256 * MIB)


def write_arrow(path: Path, table: pa.Table, compression: str | None = None) -> Path:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(str(path), table.schema, options=options) as writer:
        writer.write_table(table)
    return path


def with_column(name: str, column: Any) -> pa.Table:
    """The good table, whose rows are as many as those of the column, with that column in place of its own."""
    table = good_table()
    table = table.take(pa.array(np.arange(len(column)) % ROWS))
    return table.set_column(table.column_names.index(name), name, column)


def inflating() -> pa.Array:
    """Lists that hold two gigabytes of zeros."""
    return pa.ListArray.from_arrays([0, 0, 0, 0, 250_000_000], pa.array(np.zeros(250_000_000)))


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_an_arrow_file_of_kilobytes_that_inflates_to_gigabytes_is_refused(compression: str, tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "crafted.arrow", with_column("w", inflating()), compression)
    assert path.stat().st_size < 16 * MIB
    check_refused("arrow", path, "record batch 0 has 4 rows and makes 20[0-9]{8} bytes of [0-9]+; allowed: at most")


def test_a_column_of_an_arrow_file_that_no_job_reads_is_not_inflated(tmp_path: Path) -> None:
    path = write_arrow(tmp_path / "crafted.arrow", with_column("unread", inflating()), "zstd")
    check_read("arrow", path, 4)


def test_a_dictionary_that_inflates_to_gigabytes_is_refused(tmp_path: Path) -> None:
    values = pa.LargeStringArray.from_buffers(
        1, pa.py_buffer(np.array([0, 2_000_000_000], np.int64)), pa.py_buffer(bytes(2_000_000_000))
    )
    column = pa.DictionaryArray.from_arrays(pa.array([0, 0], pa.int32()), values)
    path = write_arrow(tmp_path / "crafted.arrow", with_column("d", column), "zstd")
    check_refused("arrow", path, "its dictionaries .* makes 20[0-9]{8} bytes")


def test_rows_without_bytes_are_bounded(tmp_path: Path) -> None:
    """A column of nulls has no bytes, however many rows it claims."""
    rows, claimed = 1_234_567, 1 << 40
    names = good_table().column_names
    path = write_arrow(tmp_path / "crafted.arrow", pa.table({name: pa.nulls(rows) for name in names}))
    data = path.read_bytes()
    assert data.count(rows.to_bytes(8, "little")) == 2 * len(names) + 1, "of each column its nulls too"
    path.write_bytes(data.replace(rows.to_bytes(8, "little"), claimed.to_bytes(8, "little")))
    check_refused("arrow", path, "record batch 0 has 1099511627776 rows")


def unsafe(kind: Any, offsets: list[int], *rest: Any, children: Any = None) -> pa.Array:
    """An array of which the offsets became others after Arrow looked at them."""
    places = np.zeros(len(offsets), np.int32)
    made = pa.Array.from_buffers(kind, len(offsets) - 1, [None, pa.py_buffer(places), *rest], children=children)
    places[:] = offsets
    return made


def unsafe_list(offsets: list[int]) -> pa.Array:
    return unsafe(pa.list_(pa.float64()), offsets, children=[pa.array([1.0, 2.0])])


def unsafe_text(offsets: list[int]) -> pa.Array:
    return unsafe(pa.string(), offsets, pa.py_buffer(b"abcd"))


def unsafe_indices(indices: list[int]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), pa.array(["a", "b"]), safe=False)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("c", unsafe_text([0, 1 << 30, 4])),
        ("c", unsafe_text([0, -5, 4])),
        ("c", unsafe_text([0, 3, 1, 4])),
        ("d", unsafe_indices([0, 1 << 20])),
        ("d", unsafe_indices([-7, 1])),
        ("w", unsafe_list([0, 1 << 28, 2])),
        ("w", unsafe_list([0, -1, 2])),
    ],
)
def test_offsets_and_indices_of_an_arrow_file_stay_within_its_arrays(name: str, column: Any, tmp_path: Path) -> None:
    table = with_column(name, column)
    path = write_arrow(tmp_path / "crafted.arrow", table)
    check_refused("arrow", path, f"column {name} is damaged: ")


def test_a_row_group_of_nothing_but_nulls_is_bounded(tmp_path: Path) -> None:
    """Runs of one value take no bytes in Parquet, however many rows there are."""
    path = tmp_path / "crafted.parquet"
    kinds = {"s": pa.list_(pa.bool_()), "w": pa.list_(pa.bool_())}
    names = ("y", "f", "c", "k", "d", "s", "w")
    table = pa.table({name: pa.nulls(20_000_000, kinds.get(name, pa.bool_())) for name in names})
    pq.write_table(table, path, row_group_size=len(table))
    assert path.stat().st_size < MIB
    check_refused("parquet", path, "row group 0 has 20000000 rows and makes [0-9]+ bytes of [0-9]+; allowed")


def test_indices_of_a_parquet_file_stay_within_its_dictionary(tmp_path: Path) -> None:
    path = tmp_path / "crafted.parquet"
    texts = pa.array([f"word {at % 20}" for at in range(24)])
    table = with_column("d", texts)
    required = pa.field("d", pa.string(), nullable=False)
    table = table.set_column(table.column_names.index("d"), required, texts)
    pq.write_table(table, path, compression="none", use_dictionary=["d"])
    before, run, after = path.read_bytes().partition(b"\x05\x07")  # 24 places of 5 bits each
    path.write_bytes(before + run + b"\xff" * 15 + after[15:])
    check_refused("parquet", path, "column d is damaged: .* 31 ")


@pytest.mark.parametrize("form", ["parquet", "orc", "arrow", "jsonl"])
@pytest.mark.timeout(3600 if FULL else 300)
def test_damaged_files_end_no_process(form: str, tmp_path: Path) -> None:
    """ORC's library crashes at times (docs/security.md), so that a crash in the long form of ORC is said alone."""
    first, end = FIRST_SEED, FIRST_SEED + MUTATED
    while first < end:
        last = min(first + 500, end)
        command = [sys.executable, str(SCRIPT), "mutate", form, str(tmp_path), str(first), str(last)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
        if done.returncode:
            seed = int(re.findall(r"^seed (\d+)$", done.stdout, re.MULTILINE)[-1])
            print(f"{form}, seed {seed} ended the process with {done.returncode}\n{done.stderr[-3000:]}")
            assert FULL, f"seed {seed}"
            assert (form, done.returncode) == ("orc", -signal.SIGSEGV), f"seed {seed}"
            first = seed + 1
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        print(f"{form}, seeds {first} to {last}: {found}")
        assert not [each for each in found if "!" in each], f"{found}\n{done.stderr[-3000:]}"
        first = last
