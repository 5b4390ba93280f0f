"""Lines to numbers and keys: the fast path, the slow path, and that they mean the same."""

from __future__ import annotations

import bz2
import gzip
import pickle
import random

import pyarrow as pa
import pytest

from sparserow.proto.errors import DataLoss, InvalidArgument, NotFound
from sparserow.proto.row_keys import hash_key, hash_keys
from sparserow.worker.data import line_decoder
from sparserow.worker.data.bad_line import BadLine, BadLinePolicy
from sparserow.worker.data.line_decoder import LineDecoder
from sparserow.worker.data.line_layout import LineField, LineLayout
from sparserow.worker.data.line_windows import LinePosition, LineWindow, first_line, header_end, read_runs

LAYOUT = LineLayout(
    columns=("y", "a", "unused", "b", "c"),
    fields=(
        LineField(0, "y", "label"),
        LineField(1, "a", "number"),
        LineField(1, "a", "text"),
        LineField(3, "b", "number"),
        LineField(4, "c", "text"),
        LineField(4, "c", "texts"),
    ),
    quote='"',
    comment="#",
    trim=True,
    missing=frozenset({"?"}),
)


def window_of(text: bytes, line: int = 1) -> LineWindow:
    return LineWindow("log.csv", LinePosition(0, line), text, text.count(b"\n") + (not text.endswith(b"\n")))


def test_key_is_xxh3_shifted_right_by_one():
    # Golden values of XXH3_64bits with seed 0, from the algorithm's reference vectors.
    assert hash_key("") == 0x2D06800538D394C2 >> 1
    assert hash_key("a") == 0xE6C632B61E964E1F >> 1
    assert hash_keys([b"", b"a"]).tolist() == [hash_key(b""), hash_key(b"a")]
    assert all(0 <= hash_key(str(i)) < 2**63 for i in range(1000))


def test_values_missing_values_comments_and_blanks():
    text = b'# heading\nyes, 1.5, x, ?, red\n\nno,,x,-2e3,\n  \nno, 3, x, 4 ,"a,b"\r\nyes, ?, x, 0, ?'
    table, numbers = LineDecoder(LAYOUT).decode(window_of(text), BadLinePolicy())
    assert numbers.tolist() == [2, 4, 6, 7]
    assert table.to_pydict() == {
        "label y": [b"yes", b"no", b"no", b"yes"],
        "number a": [1.5, None, 3, None],
        "text a": [b"1.5", None, b"3", None],
        "number b": [None, -2000, 4, 0],
        "text c": [b"red", None, b"a,b", None],
        "texts c": [[b"red"], None, [b"a,b"], None],
    }


def test_lists_in_a_field():
    layout = LineLayout(
        ("ids", "weights"),
        (LineField(0, "ids", "texts"), LineField(1, "weights", "numbers")),
        list_delimiter=" ",
        missing=frozenset({"-"}),
    )
    decode = LineDecoder(layout).decode
    good = b"a b c,1 .5 -2e1\n,\n-,-\n7, 7\n a,1\n- b,- 2\n"
    table, numbers = decode(window_of(good.replace(b", 7", b",7")), BadLinePolicy())
    assert numbers.tolist() == [1, 2, 3, 4, 5, 6]
    assert table.to_pydict() == {
        "texts ids": [[b"a", b"b", b"c"], None, None, [b"7"], [None, b"a"], [None, b"b"]],
        "numbers weights": [[1, 0.5, -20], None, None, [7], [1], [None, 2]],
    }
    for bad in (b"1 x", b"nan", b"1 inf", b"1e39"):
        with pytest.raises(BadLine, match=r"line 2, column weights: .* is not a number; expected a finite float32"):
            decode(window_of(b"a b,1 2\na b," + bad + b"\n"), BadLinePolicy())
        policy = BadLinePolicy("skip")
        table, numbers = decode(window_of(b"a b,+1 2\na b," + bad + b"\nc,3\n"), policy)
        assert table.column("numbers weights").to_pylist() == [[1, 2], [3]]
        assert (numbers.tolist(), policy.count) == ([1, 3], 1)


@pytest.mark.parametrize(
    ("line", "column", "problem"),
    [
        (b"no, 1, x, 2", None, "4 columns, expected 5 separated by ','"),
        (b"no, 1, x, 2, c, d", None, "6 columns, expected 5"),
        (b"no, one, x, 2, c", "a", "'one' is not a number; expected a finite float32 or nothing"),
        (b"no, 1, x, nan, c", "b", "'nan' is not a number"),
        (b"no, 1, x, 1e39, c", "b", "'1e39' is not a number"),
        (b'no, 1, x, 2,"c', None, "the quotes do not match"),
    ],
)
def test_a_malformed_line_is_named(line: bytes, column: str | None, problem: str):
    good = b"yes, 1, x, 2, c\n"
    text = good * 3000 + b"\n" + line + b"\n" + good
    with pytest.raises(BadLine) as caught:
        LineDecoder(LAYOUT).decode(window_of(text, line=11), BadLinePolicy())
    assert caught.value.line == 3012
    assert caught.value.column == column
    place = "log.csv, line 3012" + (f", column {column}" if column else "")
    assert str(caught.value).startswith(f"{place}: {problem}")
    assert "\n" not in str(caught.value)
    carried = pickle.loads(pickle.dumps(caught.value))  # as Ray does, from a worker to its driver
    assert (str(carried), carried.line, carried.column) == (str(caught.value), 3012, column)

    policy = BadLinePolicy("skip")
    assert len(LineDecoder(LAYOUT).decode(window_of(text), policy)[1]) == 3001
    assert policy.count == 1
    assert policy.first is not None
    assert policy.first.line == 3002


CELLS = (
    b"",
    b"?",
    b"-",
    b" ",
    b"1",
    b" 2.5 ",
    b"+3",
    b"-.5",
    b"4.",
    b"1e39",
    b"1e-50",
    b"nan",
    b"inf",
    b"0x1",
    b"DEAD",
)
MORE_CELLS = (
    b"1 2",
    b"1|2",
    b"|",
    b"x|+1",
    b"\xff",
    b"\xc3\xa9",
    b"1_0",
    b"\x00",
    b"1e",
    b"--1",
    b"1e400",
    b"123456789",
)
LAYOUTS = (
    LineLayout(("a",), (LineField(0, "a", "number"),)),
    LineLayout(("a", "b"), (LineField(0, "a", "text"), LineField(1, "b", "number")), missing=frozenset({"-"})),
    LineLayout(("a", "b"), (LineField(1, "b", "numbers"), LineField(0, "a", "label")), trim=True),
    LineLayout(("a", "b", "c"), (LineField(2, "c", "text"),), delimiter="\t", token="hex"),
    LineLayout(
        ("a", "b", "c"),
        (
            LineField(0, "a", "number"),
            LineField(0, "a", "text"),
            LineField(2, "c", "numbers"),
            LineField(1, "b", "texts"),
        ),
        list_delimiter=" ",
        missing=frozenset({"?", "-"}),
        trim=True,
    ),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=range(len(LAYOUTS)))
def test_lines_that_are_marked_together_are_those_of_the_slow_path(
    layout: LineLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    draw, delimiter, marked = random.Random(seed), layout.delimiter.encode(), 0
    decode_marked = LineDecoder._decode_marked

    def counting(self: LineDecoder, window: LineWindow, policy: BadLinePolicy) -> object:
        nonlocal marked
        found = decode_marked(self, window, policy)
        marked += 1
        return found

    def refuses(*_: object) -> object:
        raise line_decoder._NotAccepted

    for _ in range(300):
        cells = draw.sample(CELLS + MORE_CELLS, draw.randint(1, 12))
        lines = []
        for _ in range(draw.randint(1, 12)):
            count = len(layout.columns) if draw.random() < 0.8 else draw.randint(0, 4)
            end = draw.choice([b"\n", b"\n", b"\n", b"\r\n"] if draw.random() < 0.95 else [b"\r", b"\r\r\n"])
            lines.append(delimiter.join(draw.choice(cells) for _ in range(count)) + end)
        text = b"".join(lines)
        window = window_of(text if draw.random() < 0.8 else text.rstrip(b"\n") or b"x", line=draw.choice([1, 70]))
        found = []
        for path in (counting, refuses):
            monkeypatch.setattr(LineDecoder, "_decode_marked", path)
            policy = BadLinePolicy("skip")
            table, numbers = LineDecoder(layout).decode(window, policy)
            found.append((table.to_pydict(), numbers.tolist(), policy.count, str(policy.first)))
        assert found[0] == found[1], window.text
    assert marked > 20


def test_hexadecimal_tokens_are_checked():
    layout = LineLayout(("y", "c"), (LineField(1, "c", "text"),), delimiter="\t", token="hex")
    decode = LineDecoder(layout).decode
    table, _ = decode(window_of(b"0\t05db9164\n1\t\n"), BadLinePolicy())
    assert table.column("text c").to_pylist() == [b"05db9164", None]
    for token in (b"xyz", b"123456789", b" 1"):
        with pytest.raises(BadLine, match=r"column c.*1-8 hexadecimal digits"):
            decode(window_of(b"0\t1f\n0\t" + token + b"\n"), BadLinePolicy())


def test_a_quoted_field_ends_with_its_line():
    text = b'no,1,x,2,"c\nyes,1,x,2,d"\nno,1,x,2,e\n'
    policy = BadLinePolicy("skip")
    _, numbers = LineDecoder(LAYOUT).decode(window_of(text), policy)
    assert policy.first is not None
    assert (policy.first.line, policy.count, numbers.tolist()) == (1, 1, [2, 3])


def test_both_paths_mean_the_same():
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    cells = ["1", "-2.5", " 3", "?", " ?", "", "1e3", ".5", "7.", "x", "nan", "\xe9", '"q"', '"a,b"']
    for _ in range(300):
        text = "".join(
            ",".join(
                [
                    draw.choice(["yes", " no", "no"]),
                    draw.choice(cells[:9]),
                    "u",
                    draw.choice(cells[:9]),
                    draw.choice(cells),
                ]
            )
            + draw.choice(["\n", "\r\n", "\n\n"])
            for _ in range(draw.randrange(1, 6))
        ).encode()
        window = window_of(text)
        decoder = LineDecoder(LAYOUT)
        table, numbers = decoder.decode(window, BadLinePolicy("skip"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(line_decoder.pa_csv, "read_csv", refuse)
            slow, slow_numbers = decoder.decode(window, BadLinePolicy("skip"))
        assert table.to_pydict() == slow.to_pydict(), text
        assert numbers.tolist() == slow_numbers.tolist(), text


def refuse(*_: object) -> None:
    raise pa.ArrowInvalid("so that each line is decoded by itself")


def zstd(data: bytes) -> bytes:
    return pa.compress(data, "zstd", asbytes=True)


def test_runs_cover_a_file_and_their_spans_cover_them(tmp_path):
    text = b"".join(b"%d\n" % i for i in range(1000)) + b"the end"
    for name, data in (("plain", text), ("packed.gz", gzip.compress(text)), ("packed.zst", zstd(text))):
        path = tmp_path / name
        path.write_bytes(data)
        for size in (1, 7, 1000, 1001, 50_000):
            runs = list(read_runs(str(path), run_bytes=size))
            assert b"".join(run.text for run in runs) == text
            assert all(run.lines == run.text.count(b"\n") for run in runs[:-1])
            assert sum(run.lines for run in runs) == 1001
            for run in runs:
                assert text[run.place.offset :].startswith(run.text)
                assert run.place.line == text[: run.place.offset].count(b"\n") + 1
                spans = [run.span(part, 3) for part in range(3)]
                assert b"".join(span.text for span in spans) == run.text
                assert max(span.lines for span in spans) - min(span.lines for span in spans) <= 1
                assert spans[2].place.line == run.place.line + spans[0].lines + spans[1].lines
            again = list(read_runs(str(path), runs[-1].place, size))
            assert b"".join(run.text for run in again) == runs[-1].text


def test_the_end_of_a_header(tmp_path):
    path = tmp_path / "log"
    for text, end in ((b"a,b\n1,2\n", 4), (b"a,b", 3), (b"", 0)):
        path.write_bytes(text)
        assert header_end(str(path)) == LinePosition(end, 2)


def test_unreadable_files(tmp_path):
    with pytest.raises(NotFound, match=r"nothing.tsv: No such file"):
        list(read_runs(str(tmp_path / "nothing.tsv")))
    with pytest.raises(NotFound, match="directory"):
        list(read_runs(str(tmp_path)))
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(random.Random(1).randbytes(100_000))[:5000])
    with pytest.raises(DataLoss, match="damaged or cut short"):
        list(read_runs(str(cut)))
    cut = tmp_path / "cut.zst"
    cut.write_bytes(zstd(random.Random(1).randbytes(100_000))[:5000])
    with pytest.raises(DataLoss, match=r"cut.zst: the zstd file is damaged or cut short: Truncated"):
        list(read_runs(str(cut)))
    for name in ("fake.gz", "fake.zst"):
        fake = tmp_path / name
        fake.write_bytes(b"plain text\n")
        with pytest.raises(DataLoss, match="damaged or cut short"):
            first_line(str(fake))
    endless = tmp_path / "endless"
    endless.write_bytes(b"one\n" + b"x" * (10 << 20))
    with pytest.raises(InvalidArgument, match="line 2: the line is longer than 1048576 bytes"):
        list(read_runs(str(endless)))


@pytest.mark.parametrize(
    ("name", "pack", "kind"),
    [("log.csv", zstd, "zstd"), ("log.txt", gzip.compress, "gzip"), ("a.bz2", bz2.compress, "bzip2")],
)
def test_a_compressed_text_under_another_name_is_told_what_is_read(tmp_path, name, pack, kind):
    path = tmp_path / name
    path.write_bytes(pack(b"a,b\n1,2\n" * 100))
    with pytest.raises(InvalidArgument, match=rf"it is a {kind} file, .* gzip or zstd .* ends in .gz or .zst"):
        first_line(str(path))
