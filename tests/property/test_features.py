"""Features of random columns against plain loops over rows, whatever the layout of the columns in memory."""

from __future__ import annotations

import datetime
import json
import math
import os
import random
from collections.abc import Callable
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.json as pa_json
import pytest

import sparserow as sr
from sparserow.proto.config.data_config import TimeUnit
from sparserow.proto.features.base import Feature, HashUnknown
from sparserow.proto.features.compute import Jagged
from sparserow.proto.features.document import features_of, files_of
from sparserow.proto.features.feature_set import FeatureSet
from sparserow.proto.features.times import are_no_times, moments
from sparserow.worker.data.sources.json_checker import ObjectChecker
from sparserow.worker.data.sources.json_lines import _good

WORDS = ("a", "b", "", "ä", "long " * 9, "0", "7", "c|d", "e|f|g|h", "|")
VOCABULARY = "a\nb\nä\n7\n"
ROWS = 60


def seeded() -> random.Random:
    given = os.environ.get("SPARSEROW_TEST_SEED")
    seed = random.randrange(2**32) if given is None else int(given)
    print(f"SPARSEROW_TEST_SEED={seed}")
    return random.Random(seed)


def columns_of(draw: random.Random, rows: int) -> dict[str, list[Any]]:
    """A null is at each place with a probability of 15 %."""

    def some(make: Callable[[], Any]) -> list[Any]:
        return [None if draw.random() < 0.15 else make() for _ in range(rows)]

    lists = some(lambda: [draw.choice(WORDS) if draw.random() > 0.1 else None for _ in range(draw.choice([0, 1, 5]))])
    begin = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    return {
        "word": some(lambda: draw.choice(WORDS)),
        "number": some(lambda: draw.randrange(-5, 2**62)),
        "value": some(lambda: draw.choice([0.0, -2.5, 3.0, 1e9, draw.gauss(0, 10)])),
        "list": lists,
        "weight": [None if each is None else [draw.random() for _ in each] for each in lists],
        "moment": some(lambda: begin + datetime.timedelta(minutes=draw.randrange(10**6))),
    }


def layouts_of(columns: dict[str, list[Any]], draw: random.Random) -> list[Any]:
    """The same rows as a mapping, in chunks, with dictionaries that differ, and as a part of a longer table."""
    plain = pa.table(columns)
    cut = draw.randrange(len(plain) + 1)
    chunks = pa.concat_tables([plain.slice(0, cut), plain.slice(cut)])
    coded = with_dictionaries(plain)
    mixed = pa.concat_tables([with_dictionaries(plain.slice(0, cut)), with_dictionaries(plain.slice(cut))])
    wide = plain.set_column(0, "word", plain.column("word").cast(pa.large_string()))
    before = plain.slice(0, 3)
    longer = pa.concat_tables([before, plain, plain.slice(0, 2)]).combine_chunks().slice(len(before), len(plain))
    return [columns, plain, chunks, coded, mixed, wide, longer]


def with_dictionaries(table: pa.Table) -> pa.Table:
    for name in ("word", "number"):
        at = table.schema.get_field_index(name)
        table = table.set_column(at, name, table.column(name).dictionary_encode())
    return table


def hashed(token: Any, modulo: int | None = None) -> int:
    key = sr.hash_key("" if token is None else str(token))
    return key if modulo is None else key % modulo


def known(token: str | None, unknown: Any, default: str = "") -> int:
    lines = VOCABULARY.split("\n")[:-1]
    text = default if token is None else token
    if text in lines:
        return lines.index(text) + (1 if unknown == "row" else unknown.hash)
    return 0 if unknown == "row" else hashed(text) % unknown.hash


def part_of(moment: Any, part: str, zone: str) -> int:
    counts = {"hour": 24, "weekday": 7, "day": 31, "month": 12}
    if moment is None:
        return counts[part]
    local = moment.astimezone(ZoneInfo(zone))
    return {"hour": local.hour, "weekday": local.weekday(), "day": local.day - 1, "month": local.month - 1}[part]


def scaled(value: float | None, first: float, width: float, default: float) -> float:
    if value is None:
        return default
    clipped = min(max(value, -100.0), 100.0)
    return (math.copysign(math.log1p(abs(clipped)), clipped) - first) / width


def expected(feature: Feature, row: dict[str, Any]) -> Any:
    """A row's value by plain Python: a number, a key, or keys with weights."""
    match feature:
        case sr.features.IdFeature(vocabulary=None):
            return hashed(row[feature.columns[0]], feature.modulo)
        case sr.features.IdFeature():
            return known(row["word"], feature.unknown, str(feature.default))
        case sr.features.NumericFeature():
            first, second = feature.statistics or (0.0, 1.0)
            width = second - first if feature.scale == "min_max" else second
            return scaled(row["value"], first, width, feature.default)
        case sr.features.BucketizedFeature():
            edges, value = feature.boundaries or (), row["value"]
            return len(edges) + 1 if value is None else sum(edge <= value for edge in edges)
        case sr.features.CrossFeature():
            parts = tuple("" if row[name] is None else str(row[name]) for name in feature.of)
            return sr.hash_key(parts) % (feature.modulo or 2**63)
        case sr.features.TimeFeature():
            return part_of(row["moment"], feature.part, feature.zone)
        case sr.features.MultiHotFeature():
            return [hashed(each, feature.modulo) for each in row["list"] or []]
        case sr.features.SequenceFeature():
            keys = [hashed(each) for each in row["list"] or []]
            return keys[-2:] if feature.keep == "last" else keys[:2]
        case sr.features.SplitFeature():
            parts_ = (row["word"] or "").split("|") if row["word"] else []
            return [hashed(each) for each in parts_][-3:]
    raise AssertionError(feature)


FEATURES: tuple[Feature, ...] = (
    sr.features.IdFeature("word"),
    sr.features.IdFeature("number", modulo=1000),
    sr.features.IdFeature("known", column="word", vocabulary="words", default="b"),
    sr.features.IdFeature("hashed", column="word", vocabulary="words", unknown=HashUnknown(hash=3)),
    sr.features.NumericFeature("value", clip=(-100.0, 100.0), log1p=True, scale="standardize", statistics=(0.5, 2.0)),
    sr.features.NumericFeature("ranged", column="value", clip=(-100.0, 100.0), log1p=True, scale="min_max",
                      statistics=(-1.0, 3.0), default=0.25),
    sr.features.BucketizedFeature("bucket", column="value", boundaries=(-2.5, 0.0, 4.0)),
    sr.features.CrossFeature("cross", of=("word", "number", "known_twin"), modulo=10**6),
    sr.features.MultiHotFeature("weighted", column="list", weights="weight", modulo=50),
    sr.features.SequenceFeature("last", column="list", max_len=2),
    sr.features.SequenceFeature("first", column="list", max_len=2, keep="first"),
    sr.features.SplitFeature("split", column="word", max_len=3),
    *(sr.features.TimeFeature(part, column="moment", part=part, zone="America/New_York")
      for part in ("hour", "weekday", "day", "month")),
)  # fmt: skip


def read(path: str) -> bytes:
    assert path == "words"
    return VOCABULARY.encode()


def test_values_are_those_of_loops_over_rows() -> None:
    draw = seeded()
    features = FeatureSet.of(FEATURES, read)
    for rows in (0, 1, ROWS):
        columns = columns_of(draw, rows)
        columns["known_twin"] = columns["word"]
        by_row = [{name: values[at] for name, values in columns.items()} for at in range(rows)]
        for layout in layouts_of(columns, draw) if rows else [{name: [] for name in columns}]:
            arrays = features(layout)
            assert list(arrays) == [feature.name for feature in FEATURES]
            for feature in FEATURES:
                wanted, got = [expected(feature, row) for row in by_row], arrays[feature.name]
                if isinstance(got, Jagged):
                    assert got.offsets.tolist() == [0, *np.cumsum([len(each) for each in wanted], dtype=int).tolist()]
                    assert got.values.tolist() == [key for keys in wanted for key in keys], feature
                elif got.dtype == np.float32:
                    np.testing.assert_allclose(got, np.array(wanted, np.float32), rtol=1e-6, atol=1e-6)
                else:
                    assert got.tolist() == wanted, feature
            weights = arrays["weighted"].weights
            flat = [each for values in columns["weight"] for each in values or []]
            np.testing.assert_array_equal(weights, np.array(flat, np.float32))


def test_features_are_the_same_from_their_files() -> None:
    draw = seeded()
    columns = columns_of(draw, ROWS)
    columns["known_twin"] = columns["word"]
    learnt = (
        sr.features.NumericFeature("z", column="value", scale="standardize"),
        sr.features.BucketizedFeature("q", column="value", quantiles=5),
    )
    features = FeatureSet.of((*FEATURES, *learnt), read).fit([columns])
    names = tuple(feature.name for feature in features.features)
    files = files_of(features, names)
    assert set(files) == {"features.json", "vocabulary.0.txt"}, "two features have the same vocabulary"
    again, arguments = features_of(files, "s3://models/ctr/v000001")
    moved = [
        each.model_copy(update={"vocabulary": "vocabulary.0.txt"}) if each.name in features.vocabularies else each
        for each in features.features
    ]
    assert (arguments, list(again.features), again.statistics) == (names, moved, features.statistics)
    one, other = features(columns), again(columns)
    for name in names:
        for mine, theirs in zip(parts_of(one[name]), parts_of(other[name]), strict=True):
            np.testing.assert_array_equal(mine, theirs)


def parts_of(array: Any) -> tuple[Any, ...]:
    return array.parts if isinstance(array, Jagged) else (array,)


@pytest.mark.parametrize("pieces", [1, 2, 7])
def test_statistics_do_not_depend_on_the_pieces_of_the_data(pieces: int) -> None:
    values = np.random.default_rng(5).normal(3.0, 2.0, 5000)
    values[::10] = np.nan
    column = [None if math.isnan(value) else value for value in values]
    features = FeatureSet.of(
        (
            sr.features.NumericFeature("z", column="v", scale="standardize"),
            sr.features.NumericFeature("r", column="v", scale="min_max"),
            sr.features.BucketizedFeature("q", column="v", quantiles=10),
        ),
        read,
    )
    assert features.lacks == ("z", "r", "q")
    with pytest.raises(
        sr.errors.FailedPrecondition, match="z, r, q need statistics of the training data; call fit first"
    ):
        features({"v": column})
    fitted = features.fit({"v": part.tolist()} for part in np.array_split(np.array(column, object), pieces))
    arrays, present = fitted({"v": column}), ~np.isnan(values)
    assert abs(arrays["z"][present].mean()) < 1e-5
    assert abs(arrays["z"][present].std() - 1) < 1e-5
    assert (arrays["r"][present].min(), arrays["r"][present].max()) == (0.0, 1.0)
    counts = np.bincount(arrays["q"], minlength=11)
    assert counts[10] == 500, "nulls have a bucket of their own"
    assert np.all(np.abs(counts[:10] - 450) <= 1)
    assert fitted.keys_of("q") == 11


def test_texts_of_times_may_have_zones() -> None:
    """ISO 8601 with an offset, with Z and without a zone, which is UTC, also in one column."""
    texts = ["2024-01-05T06:30:00Z", "2024-01-05 06:30:00+02:00", "2024-01-05T06:30:00-0330", "2024-01-05", None]
    moments = [datetime.datetime(2024, 1, 5, 6, 30), datetime.datetime(2024, 1, 5, 4, 30)]
    moments += [datetime.datetime(2024, 1, 5, 10), datetime.datetime(2024, 1, 5)]
    hours = [moment.replace(tzinfo=datetime.UTC).astimezone(ZoneInfo("Asia/Tokyo")).hour for moment in moments]
    feature = sr.features.TimeFeature("hour", column="at", zone="Asia/Tokyo")
    for kind in (pa.string(), pa.large_binary(), pa.dictionary(pa.int32(), pa.string())):
        found = sr.features.Features([feature])({"at": pa.array(texts, pa.string()).cast(kind)})["hour"]
        assert found.tolist() == [*hours, 24], kind


def drawn_time(draw: random.Random) -> str:
    """A text that is nearly a time: with days, hours and zones that there are, and others."""
    text = f"{draw.choice([0, 4, 1900, 2000, 2023, 2024, 9999]):04}-{draw.randint(0, 13):02}"
    text += f"-{draw.choice([0, 1, 28, 29, 30, 31, 32]):02}"
    for before, values in (("T", (0, 19, 23, 24)), (":", (0, 59, 60)), (":", (0, 59, 60))):
        if draw.random() < 0.2:
            break
        text += f"{before}{draw.choice(values):02}"
    text += draw.choice(["", "", "." + "1234567"[: draw.randint(0, 7)]])
    text += draw.choice(["", "", "", "Z", "+01", "-23", "+24", "+0130", "+01:60", "z", "+1", " Z", " ", "\n"])
    return draw.choice(
        [text, text, text.replace("T", " "), str(draw.randint(-(1 << 70), 1 << 70) >> draw.randrange(64))]
    )


@pytest.mark.parametrize("unit", [None, "s", "ms", "us", "ns"])
def test_which_cells_are_no_times_is_what_arrow_says_of_each_alone(unit: TimeUnit | None) -> None:
    draw = seeded()
    texts = [None, *(drawn_time(draw) for _ in range(4000))]
    edges = {"s": 10**6, "ms": 1000}.get(str(unit), 1)
    counts = [sign * (2**63 // edges) + by for sign in (1, -1) for by in range(-2, 3)]
    texts += [str(count) for count in counts]
    numbers = pa.array([count for count in counts if -(2**63) <= count < 2**63], pa.int64())
    for cells in (pa.array(texts), pa.array(texts).dictionary_encode(), *([] if unit is None else [numbers])):
        alone = []
        for at in range(len(cells)):
            try:
                moments(cells[at : at + 1], unit)
                alone.append(False)
            except pa.ArrowInvalid:
                alone.append(True)
        assert are_no_times(cells, unit).tolist() == alone
        good = cells.filter(pa.array(np.invert(alone)))
        assert len(moments(good, unit)) == len(good), "together as well"


JSON_TYPES = pa.schema(
    [
        ("i", pa.int64()),
        ("u", pa.uint64()),
        ("f", pa.float64()),
        ("s", pa.string()),
        ("b", pa.bool_()),
        ("l", pa.list_(pa.int64())),
        ("t", pa.struct([("a", pa.float64()), ("c", pa.list_(pa.string()))])),
    ]
)
JSON_GOOD = {"i": "1", "u": "2", "f": "0.5", "s": '"x"', "b": "true", "l": "[1]", "t": '{"a": 1}'}
JSON_NUMBERS = """
1 -1 1.0 1.5 1e3 9223372036854775807 9223372036854775808 -9223372036854775809 18446744073709551616 1e400 -1e400 1e-400
1e - .5 01 +1 1. -0 -0.0 -01 NaN -NaN Inf -Inf Infinity -Infinity Infinite
"""
JSON_OTHERS = """true false null tru '' [] [1] [1.5] [null] [[1]] [1,] [-0] [1]] {} {1"""
JSON_VALUES = (
    *JSON_NUMBERS.split(),
    *JSON_OTHERS.split(),
    *('"x"', '"1"', '["a"]', '{"a":1}', '{"a":"x"}', '{"a":1,"a":2}', '{"q":1,"q":2}', '{"c":["x",null]}', '{"c":[1]}'),
    *(r'"\ud800"', r'"\ud83d\ude00"', r'"\udc00"', r'"\u0000"', '"\t"', '"\xff"', r'"NaN \u0041"', r'"\x"', '"a'),
    *("1" * 400, "[" * 50 + "]" * 50, "", " 1 ", "\r1", "\x0b1", "\x00"),
)


def drawn_json(draw: random.Random) -> bytes:
    """A line that begins with an object of ``JSON_TYPES``, which is often wrong in some way."""
    names = draw.sample([*JSON_GOOD, "z", "y", "\\u0069"], draw.randint(0, 5))
    values = [
        draw.choice(JSON_VALUES) if draw.random() < 0.35 or name not in JSON_GOOD else JSON_GOOD[name] for name in names
    ]
    items = [f'"{name}":{value}' for name, value in zip(names, values, strict=True)]
    text = "{" + ",".join([*items, *items[: draw.random() < 0.05]]) + "}"
    if draw.random() < 0.1:
        text += draw.choice(["{}", " null", "x", ",", " ", "\r", "\x00", "}"])
    if draw.random() < 0.1:
        at = draw.randrange(1, len(text) + 1)
        text = text[:at] + draw.choice(['"', ",", ":", "{", "}", "\\", "0", "-", ""]) + text[at + draw.randint(0, 1) :]
    return text.encode("latin-1")


def refused_by_arrow(line: bytes, schema: pa.Schema) -> bool:
    options = pa_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    try:
        return bool(pa_json.read_json(pa.BufferReader(line), parse_options=options).num_rows != 1)
    except pa.ArrowException:
        return True


def test_a_line_of_json_is_refused_by_python_where_arrow_refuses_it() -> None:
    draw, checker = seeded(), ObjectChecker(JSON_TYPES)
    for _ in range(5000):
        line = drawn_json(draw)
        assert checker.is_refused(line) == refused_by_arrow(line, JSON_TYPES), line


@pytest.mark.parametrize("flat", [False, True], ids=["with objects", "flat"])
def test_the_good_ones_of_many_lines_of_json_are_those_that_arrow_takes_alone(flat: bool) -> None:
    """The quick looks, at many lines together, leave out no line that Arrow takes; few others are left to halving."""
    schema = JSON_TYPES.remove(JSON_TYPES.get_field_index("t")) if flat else JSON_TYPES
    draw, checker = seeded(), ObjectChecker(schema)
    looked_at = found_plain = 0
    for _ in range(100):
        good = b'{"s": "a", "i":3 ,"l":[1, null],"z":{}}' if draw.random() < 0.1 else b'{"s":"b","f":-1.5e3,"z":null}'
        lines = [good if draw.random() < 0.5 else drawn_json(draw) for _ in range(40)]
        taken = [at for at, line in enumerate(lines) if not refused_by_arrow(line, schema)]
        refused = checker.surely_refused(lines)
        assert not set(refused) & set(taken), [lines[at] for at in set(refused) & set(taken)]
        assert all(checker.surely_refused([lines[at]]) for at in refused)
        suspects = set(checker.suspects(lines))
        looked_at, found_plain = looked_at + len(lines), found_plain + len(lines) - len(suspects)
        for at in set(range(len(lines))) - suspects - set(taken):
            names = [name for name, _ in json.loads(lines[at].decode("latin-1"), object_pairs_hook=list)]
            assert len(set(names)) < len(names), lines[at]
        found = np.concatenate(
            [np.empty(0, np.int64), *(numbers for _, numbers in _good(list(enumerate(lines)), schema))]
        )
        assert found.tolist() == taken
    assert (found_plain > looked_at / 3) == flat


def test_lines_of_json_that_are_objects_together_alone_are_refused() -> None:
    schema = pa.schema([("a", pa.list_(pa.struct([("b", pa.int64())])))])
    lines = [b'{"a":[{"b":1}', b'{"b":2}]}', b'{"a":[]},{"a":[]}', b'{"a":[{"b":1}]}']
    found = [numbers.tolist() for _, numbers in _good(list(enumerate(lines)), schema)]
    assert [number for some in found for number in some] == [3]


def test_a_look_at_a_line_of_json_takes_time_in_proportion_to_its_length() -> None:
    checker = ObjectChecker(pa.schema([("l", pa.list_(pa.float64())), ("s", pa.string())]))
    for part in (b'"z":1,', b'"l":[1,1,1],', b'"l":[' + b"1," * 2000, b'"s":"' + b"a" * 2000, b"{", b" "):
        line = b"{" + part * 2000
        assert checker.suspects([line[: 1 << 20]]) == [0]  # the deadline of a test ends it where a pattern tries again
