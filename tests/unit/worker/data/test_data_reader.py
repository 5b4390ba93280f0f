"""Readers: formats, transforms, dealing of samples to ranks, shuffling, resuming."""

from __future__ import annotations

import gzip
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from column_uses import data_of
from sparserow.proto.config.data_config import DataConfig
from sparserow.proto.errors import InvalidArgument, NotFound
from sparserow.proto.row_keys import hash_key
from sparserow.worker.data import BadLine, ReadOptions
from sparserow.worker.data.sources import fit_features, open_reader

COUNTING = ["format=csv", "csv={columns: [y, x, c], label: y, numeric: {x: none}, categorical: [c]}"]


def config_of(path: Path, *sets: str) -> DataConfig:
    return data_of(f"train={path}", f"test={path}", *sets)


def reader_of(config: DataConfig, **options):
    return open_reader(config, "train", fit_features(config), ReadOptions(**options))


@pytest.fixture
def counting(tmp_path):
    """1,003 samples whose number is their index."""
    path = tmp_path / "counting.csv"
    path.write_text("".join(f"{i % 2},{i},k{i % 7}\n" for i in range(1003)))
    return path


def indexes(batches) -> list[int]:
    return [int(value) for batch in batches for value in batch.dense[:, 0]]


CRITEO_ROW = ["1", "3", "", "-1", *["0"] * 10, "05db9164", "", *["ab"] * 24]


def criteo_text(delimiter: str, rows: list[list[str]]) -> str:
    return "".join(delimiter.join(row) + "\n" for row in rows)


@pytest.mark.parametrize("form", ["tsv", "tsv.gz", "csv", "reordered csv"])
def test_criteo_forms_read_the_same(tmp_path, form):
    names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    order = list(range(40))
    if form == "reordered csv":
        order = order[::-1]
    rows = [[CRITEO_ROW[i] for i in order]] * 3
    if form.endswith("csv"):
        rows = [[names[i] for i in order], *rows]
    text = criteo_text("\t" if "tsv" in form else ",", rows)
    path = tmp_path / f"log.{form.split()[-1]}"
    path.write_bytes(gzip.compress(text.encode()) if form.endswith("gz") else text.encode())
    (batch,) = reader_of(config_of(path), batch_size=8)
    assert len(batch) == 3
    assert batch.dense.shape == (3, 13)
    assert batch.dense.dtype == torch.float32
    torch.testing.assert_close(batch.dense[0, :4], torch.tensor([math.log(4), 0.0, -math.log(2), 0.0]))
    assert batch.sparse.shape == (3, 26)
    assert batch.sparse.dtype == torch.int64
    assert batch.sparse[0].tolist() == [hash_key("05db9164"), hash_key(""), *[hash_key("ab")] * 24]
    assert batch.labels.tolist() == [1, 1, 1]


def test_criteo_refuses_other_shapes(tmp_path):
    path = tmp_path / "log.tsv"
    path.write_text("0\t1\t2\n")
    with pytest.raises(InvalidArgument, match=r"log.tsv, line 1: 3 columns, expected 40"):
        reader_of(config_of(path), batch_size=8)
    path.write_text("")
    with pytest.raises(InvalidArgument, match="line 1: empty"):
        reader_of(config_of(path), batch_size=8)
    path.write_text(",".join(["label", *["I1"] * 39]) + "\n")
    with pytest.raises(InvalidArgument, match="the header lacks the column C1;"):
        reader_of(config_of(path), batch_size=8)


def test_criteo_bad_line_has_file_line_and_column(tmp_path):
    path = tmp_path / "log.csv"
    header = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    bad = [*CRITEO_ROW]
    bad[4] = "3x"
    path.write_text(criteo_text(",", [header, CRITEO_ROW, bad, CRITEO_ROW]))
    with pytest.raises(BadLine, match=r"log.csv, line 3, column I4: '3x' is not a number"):
        list(reader_of(config_of(path), batch_size=8))
    reader = reader_of(config_of(path, "on_bad_line=skip"), batch_size=8)
    assert sum(len(batch) for batch in reader) == 2
    assert reader.bad_lines == 1
    assert sum(len(batch) for batch in reader) == 2
    assert reader.bad_lines == 1  # of the pass, not of all passes
    assert "line 3, column I4" in str(reader.first_bad_line)


def test_csv_schema_by_name_position_and_header(tmp_path):
    named, bare = tmp_path / "named.csv", tmp_path / "bare.csv"
    named.write_text('"y";x;c\n1;2;"u;v"\n')
    bare.write_text("# first\n1;2;'u;v'\n")
    by_name = config_of(
        named,
        "format=csv",
        "csv={header: true, delimiter: ;, quote: '\"', label: y, numeric: {x: none}, categorical: [c]}",
    )
    by_position = config_of(
        bare,
        "format=csv",
        "csv={delimiter: ;, quote: \"'\", comment: '#', label: 0, numeric: {'1': none}, categorical: [2]}",
    )
    for config in (by_name, by_position):
        (batch,) = reader_of(config, batch_size=4)
        assert (batch.labels.tolist(), batch.dense.tolist(), batch.sparse.tolist()) == ([1], [[2]], [[hash_key("u;v")]])


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (
            "{label: z, numeric: {column_1: log}}",
            "data.csv.label: no column 'z' in .*; allowed: column_0, column_1, column_2",
        ),
        ("{label: 0, numeric: {'7': log}}", "features.column_7: no column 'column_7' in .*; nearest"),
        ("{label: 9, numeric: {'1': log}}", "data.csv.label: no column 9 in .*; allowed: 0 to 2"),
        ("{label: 0, categorical: [0]}", "features.column_0: reads 'column_0', which is data.csv.label"),
        ("{label: 0}", "features: there is none"),
        ("{label: y, columns: [y, y, c], categorical: [c]}", "a column name stands twice"),
        ("{label: y, header: true, columns: [y, x, c], categorical: [c]}", "the header differs from data.csv.columns"),
        ("{label: 0, categorical: [1], delimiter: ab}", "csv.delimiter: 'ab' is not allowed; allowed: one ASCII"),
    ],
)
def test_schema_errors(counting, schema, message):
    with pytest.raises(InvalidArgument, match=message):
        reader_of(config_of(counting, "format=csv", f"csv={schema}"), batch_size=4)


def test_format_needs_its_section(counting):
    with pytest.raises(InvalidArgument, match="format csv needs a section csv"):
        config_of(counting, "format=csv")
    with pytest.raises(InvalidArgument, match="format criteo has no use for a section csv"):
        config_of(counting, COUNTING[1])


def test_files_and_patterns(tmp_path, counting):
    (tmp_path / "more.csv").write_text("1,5000,z\n")
    config = data_of(f"train={tmp_path}/*.csv", f"test={counting}", *COUNTING)
    assert indexes(reader_of(config, batch_size=100)) == [*range(1003), 5000]
    with pytest.raises(NotFound, match=r"data.train: .*none: no file has such a name"):
        reader_of(data_of(f"train={tmp_path}/*.none", "test=x", *COUNTING), batch_size=1)
    with pytest.raises(NotFound, match=r"absent.csv: No such file"):
        reader_of(config_of(tmp_path / "absent.csv", *COUNTING), batch_size=1)
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n")
    with pytest.raises(InvalidArgument, match=r"empty.txt: no data lines"):
        list(reader_of(config_of(empty, *COUNTING), batch_size=1))


def test_standardise_and_buckets(tmp_path):
    random = np.random.default_rng(3)
    values = random.normal(5, 3, 1000)
    path = tmp_path / "numbers.csv"
    path.write_text("".join(f"0,{v!r},{i % 3}\n" for i, v in enumerate(map(float, values))) + "1,,2\n")
    config = config_of(
        path,
        "format=csv",
        "csv={label: 0, numeric: {'1': standardize, '2': log_standardize}, buckets: {'1': 10, '2': 8}}",
    )
    features = fit_features(config)
    assert features.spec.sparse_names == ("column_1_bucket", "column_2_bucket")
    (batch,) = open_reader(config, "train", features, ReadOptions(batch_size=2000))
    expected = torch.tensor((values - values.mean()) / values.std(), dtype=torch.float32)
    torch.testing.assert_close(batch.dense[:1000, 0], expected)
    assert batch.dense[1000, 0] == 0
    torch.testing.assert_close(batch.dense[:, 1].mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(batch.dense[:, 1].std(correction=0), torch.tensor(1.0))
    assert torch.bincount(batch.sparse[:1000, 0]).tolist() == [100] * 10
    order = torch.argsort(torch.from_numpy(values))
    assert (batch.sparse[:1000, 0][order].diff() >= 0).all()
    assert batch.sparse[1000, 0] == 10  # missing
    assert batch.sparse[:4, 1].tolist() == [0, 1, 2, 0]  # fewer values than buckets


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("world", "batch", "window"), [(1, 64, 300), (2, 32, 1), (3, 10, 2000), (4, 7, 100), (3, 500, 1)]
)
def test_ranks_share_every_sample_once_in_equal_batches(counting, shuffle, world, batch, window):
    readers = [
        reader_of(
            config_of(counting, *COUNTING),
            batch_size=batch,
            rank=rank,
            world=world,
            shuffle=shuffle,
            shuffle_rows=window,
            seed=5,
        )
        for rank in range(world)
    ]
    seen = []
    for _ in range(3):
        parts = [list(reader) for reader in readers]
        assert len({len(part) for part in parts}) == 1
        seen.append([indexes(part) for part in parts])
        assert sorted(itertools.chain.from_iterable(seen[-1])) == list(range(1003))
    if shuffle and window > 1:
        assert seen[0] != seen[1] != seen[2]
    elif not shuffle and world == 1:
        assert seen[0] == seen[1] == [list(range(1003))]


def test_equal_numbers_of_batches_although_lines_are_bad(tmp_path):
    path = tmp_path / "half.csv"
    path.write_text("0,1,a\n" * 50 + "0,one,a\n" * 50)
    config = config_of(path, *COUNTING, "on_bad_line=skip")
    readers = [reader_of(config, batch_size=10, rank=rank, world=2) for rank in range(2)]
    sizes = [[len(batch) for batch in reader] for reader in readers]
    assert sizes == [[10, 10, 10, 0, 0], [10, 10, 0, 0, 0]]
    assert [reader.bad_lines for reader in readers] == [20, 30]


def test_order_depends_on_the_seed_alone(counting):
    def order(seed: int) -> list[int]:
        return indexes(reader_of(config_of(counting, *COUNTING), batch_size=16, shuffle=True, seed=seed))

    assert order(1) == order(1) != order(2)
    assert order(1) != sorted(order(1))


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_reader_resumes_between_any_two_batches(tmp_path, suffix):
    text = "0,bad,x\n" + "".join(f"{i % 2},{i},k\n" for i in range(200)) + "0,bad,x\n"
    for name in ("a", "b"):
        data = text.encode()
        packed = {"": data, ".gz": gzip.compress(data), ".zst": pa.compress(data, "zstd", asbytes=True)}
        (tmp_path / f"{name}.csv{suffix}").write_bytes(packed[suffix])
    config = config_of(tmp_path / f"*.csv{suffix}", *COUNTING, "on_bad_line=skip")
    options = {"batch_size": 16, "shuffle": True, "shuffle_rows": 64, "seed": 9, "rank": 1, "world": 2}
    whole = reader_of(config, **options)
    states, batches = [whole.state_dict()], []
    for _ in range(2):
        for batch in whole:
            batches.append(batch)
            states.append(whole.state_dict())
    total_bad = whole.bad_lines
    per_epoch = len(batches) // 2
    for at, state in enumerate(states[:-1]):
        reader = reader_of(config, **options)
        reader.load_state_dict(json.loads(json.dumps(state)))
        rest = list(reader)
        epoch_end = per_epoch * (1 + at // per_epoch) if at % per_epoch else at + per_epoch
        if at and at % per_epoch == 0 and not rest:  # the end of an epoch's last batch, before its end was met
            continue
        assert indexes(rest) == indexes(batches[at:epoch_end])
        assert reader.bad_lines == total_bad
        if epoch_end == per_epoch:
            assert indexes(reader) == indexes(batches[per_epoch:])


def test_a_reader_resumes_after_the_last_batch_of_an_epoch(counting):
    options = {"batch_size": 100, "shuffle": True, "seed": 2}
    whole = reader_of(config_of(counting, *COUNTING), **options)
    for _ in whole:
        state = whole.state_dict()
    second = indexes(whole)
    reader = reader_of(config_of(counting, *COUNTING), **options)
    reader.load_state_dict(state)
    assert indexes(reader) == []
    assert indexes(reader) == second


def test_state_of_another_dealing_is_refused(counting):
    config = config_of(counting, *COUNTING)
    state = reader_of(config, batch_size=10).state_dict()
    for options, message in (
        ({"shuffle": True}, "reader state: shuffle was False; this reader has True"),
        ({"in_order": False}, "reader state: in_order was True; this reader has False"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            reader_of(config, batch_size=10, **options).load_state_dict(state)
    shuffled = reader_of(config, batch_size=10, shuffle=True, seed=1).state_dict()
    with pytest.raises(InvalidArgument, match="reader state: seed was 1; this reader has 2"):
        reader_of(config, batch_size=10, shuffle=True, seed=2).load_state_dict(shuffled)
    counting.write_text(counting.read_text() + "0,1003,k0\n")
    with pytest.raises(InvalidArgument, match="reader state: samples was 1003; this reader has 1004"):
        reader_of(config, batch_size=10).load_state_dict(state)


def test_the_state_of_an_older_version_is_refused_by_name(counting):
    state = reader_of(config_of(counting, *COUNTING), batch_size=10).state_dict()
    with pytest.raises(InvalidArgument, match=r"reader state\.version: 2 is not allowed; allowed: 3\. Another version"):
        reader_of(config_of(counting, *COUNTING), batch_size=10).load_state_dict({**state, "version": 2})


def test_a_pass_left_early_starts_anew(counting):
    reader = reader_of(config_of(counting, *COUNTING), batch_size=100)
    next(iter(reader))
    assert indexes(reader) == list(range(1003))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "ReadOptions.batch_size: 0 is not allowed; allowed: >= 1"),
        ({"batch_size": 1, "rank": 2, "world": 2}, r"ReadOptions.rank: 2 is not allowed; allowed: \[0, 2\)"),
        ({"batch_size": 1, "world": 0}, "ReadOptions.world"),
        ({"batch_size": 1, "shuffle_rows": 0}, "ReadOptions.shuffle_rows"),
        ({"batch_size": 1, "seed": -1}, "ReadOptions.seed"),
    ],
)
def test_option_errors(options, message):
    with pytest.raises(InvalidArgument, match=message):
        ReadOptions(**options)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            "numeric: {x: log}, categorical: [c]",
            '.dense x. was .*"log1p": false.*; this reader has .*"log1p": true',
        ),
        ("numeric: {x: none}, categorical: [c], buckets: {x: 4}", "the input 'sparse x_bucket' was not there"),
        ("categorical: [c]", "the input 'dense x' was .*; this reader has not there"),
        ("numeric: {x: none}, categorical: [y2, c]", "the inputs of the model are the same in another order"),
    ],
)
def test_a_state_with_other_inputs_is_refused(counting, columns, message):
    """Else rows would go on with other keys than they were trained with."""
    first = "csv={columns: [y, x, c], label: y, numeric: {x: none}, categorical: [c]}"
    if "y2" in columns:
        counting.write_text("".join(f"{i % 2},{i},k,m\n" for i in range(50)))
        first, columns = (
            f"csv={{columns: [y, x, c, y2], label: y, numeric: {{x: none}}, categorical: [{order}]}}"
            for order in ("c, y2", "y2, c")
        )
    else:
        columns = f"csv={{columns: [y, x, c], label: y, {columns}}}"
    before = reader_of(config_of(counting, "format=csv", first), batch_size=10)
    reader, state = reader_of(config_of(counting, "format=csv", columns), batch_size=10), before.state_dict()
    assert reader.digest(100) != before.digest(100), "leases of an elastic job are refused as well"
    with pytest.raises(InvalidArgument, match=message):
        reader.load_state_dict(json.loads(json.dumps(state)))


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("label: z", 'the label \'label\' was .*"column": "y".*; this reader has .*"column": "z"'),
        ("label: y, label_values: {'0': 1, '1': 0}", "the label 'label' was .*; this reader has .*\"0\": 1.0"),
    ],
)
def test_a_state_with_another_label_is_refused(tmp_path, label, message):
    """Else a model that was trained for one label would go on with another."""
    path = tmp_path / "two.csv"
    path.write_text("".join(f"{i % 2},{i // 2 % 2},k\n" for i in range(50)))
    first, second = (
        reader_of(
            config_of(path, "format=csv", f"csv={{columns: [y, z, c], categorical: [c], {which}}}"), batch_size=10
        )
        for which in ("label: y", label)
    )
    state = json.loads(json.dumps(first.state_dict()))
    assert first.digest(100) != second.digest(100), "leases of an elastic job are refused as well"
    with pytest.raises(InvalidArgument, match=message):
        second.load_state_dict(state)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("header", ["", "x,c,y\n"])
def test_a_byte_order_mark_is_left_out(tmp_path, header, suffix):
    """Else the first column of a header has another name."""
    text = header + "".join(f"{i},k{i % 7},{i % 2}\n" for i in range(50))
    found = []
    for name, mark in (("plain.csv", b""), ("marked.csv", b"\xef\xbb\xbf")):
        content, path = mark + text.encode(), tmp_path / (name + suffix)
        path.write_bytes(gzip.compress(content) if suffix else content)
        columns = "header: true" if header else "columns: [x, c, y]"
        section = f"csv={{{columns}, label: y, categorical: [x, c]}}"
        found.append(list(reader_of(config_of(path, "format=csv", section), batch_size=10)))
    for plain, marked in zip(*found, strict=True):
        assert torch.equal(plain.sparse, marked.sparse)
