"""Features that are wrong: options, columns, vocabularies and files; each error names what is at fault."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import sparserow as sr
from sparserow.proto.errors import DataLoss, InvalidArgument, NotFound
from sparserow.proto.features.base import Feature
from sparserow.proto.features.document import FEATURES, features_of, files_of, vocabulary_files
from sparserow.proto.features.feature_set import FeatureSet
from sparserow.proto.features.kinds import KINDS, feature_of


def no_file(path: str) -> bytes:
    raise AssertionError(path)


def set_of(*features: Feature) -> FeatureSet:
    return FeatureSet.of(features, no_file)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"features\.f\.kind: None is not allowed; allowed: id, dense, bucketize, cross, multi_hot"),
        ({"kind": "embed"}, r"features\.f\.kind: 'embed' is not allowed"),
        ({"kind": "id", "modulo": 0}, r"features\.f: modulo: 0 is not allowed; allowed: an integer >= 1"),
        ({"kind": "id", "colum": "x"}, r"features\.f: colum: unknown key; did you mean 'column'"),
        ({"kind": "id", "unknown": "row"}, "unknown: has no effect without vocabulary"),
        ({"kind": "id", "vocabulary": "v", "modulo": 3}, "modulo: has no effect with vocabulary"),
        ({"kind": "dense", "clip": [2, 1]}, r"clip: \[2.0, 1.0\] is not allowed; allowed: \[low, high\]"),
        ({"kind": "dense", "statistics": [0, 1]}, "statistics: has no effect with scale none"),
        ({"kind": "dense", "scale": "standardize", "statistics": [0, 0]}, r"allowed: \[mean, std\] with std > 0"),
        ({"kind": "bucketize"}, "boundaries, quantiles: exactly one of them is needed"),
        ({"kind": "bucketize", "boundaries": [1, 1]}, "boundaries: .* allowed: numbers in ascending order"),
        ({"kind": "cross", "of": ["a"]}, r"of: \('a',\) is not allowed; allowed: a sequence"),
        ({"kind": "multi_hot", "weights": "w", "pool": "max"}, "weights: is not possible with pool max"),
        ({"kind": "sequence", "keep": "first"}, "keep: has no effect without max_len"),
        ({"kind": "time", "part": "minute"}, "part: 'minute' is not allowed; allowed: hour, weekday, day, month"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        feature_of("f", options)


def test_wrong_sets_are_named() -> None:
    with pytest.raises(InvalidArgument, match="features: there is none"):
        set_of()
    with pytest.raises(InvalidArgument, match="two of them have the name 'a'"):
        set_of(sr.features.IdFeature("a"), sr.features.NumericFeature("a"))
    with pytest.raises(InvalidArgument, match=r"name: '9a' is not allowed; allowed: a name of letters"):
        sr.features.IdFeature("9a")
    with pytest.raises(InvalidArgument, match=r"features\.t\.zone: 'Mars/Olympus' is no zone"):
        set_of(sr.features.TimeFeature("t", zone="Mars/Olympus"))
    assert set(KINDS) == {"id", "dense", "bucketize", "cross", "multi_hot", "sequence", "split", "time"}


@pytest.mark.parametrize(
    ("feature", "columns", "message"),
    [
        (
            sr.features.IdFeature("user"),
            {"usr": [1]},
            "log.parquet: column 'user' of feature 'user': .* nearest names: usr",
        ),
        (sr.features.IdFeature("a"), {"a": [1.5]}, "column 'a' .* has type double; an integer or a text is needed"),
        (sr.features.NumericFeature("a"), {"a": ["x"]}, "column 'a' .* has type string; a number is needed"),
        (sr.features.NumericFeature("a"), {"a": [1.0, float("inf")]}, "row 1 is inf, which is not finite as a float32"),
        (sr.features.NumericFeature("a", on_null="refuse"), {"a": [1.0, None]}, "row 1 is null, which on_null refuses"),
        (sr.features.IdFeature("a", on_null="refuse"), {"a": [None, 1]}, "row 0 is null, which on_null refuses"),
        (sr.features.MultiHotFeature("a"), {"a": ["x"]}, "has type string; a list is needed"),
        (
            sr.features.MultiHotFeature("a", max_len=1),
            {"a": [[1], [1, 2]]},
            r"row 1 has 2 keys; allowed: at most 1 \(max_len\)",
        ),
        (
            sr.features.MultiHotFeature("a", weights="w"),
            {"a": [[1, 2]], "w": [[1.0]]},
            "row 0 has 1 weights for 2 keys",
        ),
        (
            sr.features.MultiHotFeature("a", weights="w"),
            {"a": [[1]], "w": [[None]]},
            "has a weight that is null or not fin",
        ),
        (
            sr.features.SequenceFeature("a", on_null="refuse"),
            {"a": [[1, None]]},
            "row 0 has a null in its list, which on_null",
        ),
        (sr.features.TimeFeature("a"), {"a": ["noon"]}, "row 0 is no timestamp: 'noon'"),
        (
            sr.features.TimeFeature("a"),
            {"a": [3]},
            "has type int64; a timestamp, a date, or a text of ISO 8601 is needed",
        ),
        (sr.features.IdFeature("a"), {"a": [1], "b": [1, 2]}, "the columns have different lengths: a 1, b 2"),
        (sr.features.IdFeature("a"), {"a": [1, "x"]}, "column 'a': Arrow cannot take it"),
    ],
)
def test_wrong_columns_are_named(feature: Feature, columns: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        set_of(feature)(columns, "log.parquet")


def test_two_columns_of_one_name_are_refused() -> None:
    table = pa.table([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(InvalidArgument, match="there are 2 columns of this name"):
        set_of(sr.features.IdFeature("a"))(table)


def test_vocabularies_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    with pytest.raises(NotFound, match=r"words\.txt: the file does not exist"):
        sr.features.Features([sr.features.IdFeature("a", vocabulary=str(path))])
    path.write_bytes(b"")
    with pytest.raises(InvalidArgument, match="the file has no line"):
        sr.features.Features([sr.features.IdFeature("a", vocabulary=str(path))])
    path.write_bytes(b"x\ny\nx\n")
    with pytest.raises(InvalidArgument, match="line 3 repeats line 1, 'x'"):
        sr.features.Features([sr.features.IdFeature("a", vocabulary=str(path))])
    path.write_bytes(b"x\r\ny")
    features = sr.features.Features([sr.features.IdFeature("a", vocabulary=str(path), unknown="refuse", default="y")])
    assert features.keys_of("a") == 2
    assert features({"a": ["y", "x", None]})["a"].tolist() == [1, 0, 1]
    with pytest.raises(InvalidArgument, match=r"has 'z', which is not in the vocabulary .*words\.txt, and unknown is"):
        features({"a": ["x", "z"]})


def test_damaged_documents_are_refused() -> None:
    features = set_of(sr.features.IdFeature("a"), sr.features.BucketizedFeature("b", quantiles=2)).fit(
        [{"a": [1], "b": [1.0]}]
    )
    whole = files_of(features, ("a", "b"))
    document = json.loads(whole[FEATURES])
    assert features_of(whole, "v1")[0].features == features.features
    for change in (
        {"features": []},
        {"features": {"a": {"kind": "id", "modulo": 0}, "b": document["features"]["b"]}},
        {"statistics": {}},
        {"statistics": {"b": ["x"]}},
        {"arguments": ["a"]},
        {"arguments": 3},
        {"features": {**document["features"], "a": {"kind": "id", "vocabulary": "absent.txt"}}},
    ):
        damaged = {FEATURES: json.dumps({**document, **change}).encode()}
        with pytest.raises(DataLoss, match=r"v1/features\.json: is damaged"):
            features_of(damaged, "v1")
    with pytest.raises(DataLoss, match="it is not JSON"):
        features_of({FEATURES: b"{"}, "v1")


def test_features_of_another_format_are_refused_by_name() -> None:
    whole = files_of(set_of(sr.features.IdFeature("a")), ("a",))
    document = json.loads(whole[FEATURES])
    for read in (features_of, lambda files, where: vocabulary_files(files[FEATURES], where)):
        for other in (1, 3):
            changed = {FEATURES: json.dumps({**document, "format": other}).encode()}
            text = rf"v1/features\.json: the document of features has format {other}; this program reads format 2"
            with pytest.raises(DataLoss, match=text):
                read(changed, "v1")


def test_a_timestamp_without_a_zone_is_in_utc() -> None:
    noon = datetime.datetime(2026, 7, 1, 12)
    features = set_of(sr.features.TimeFeature("t", zone="Asia/Tokyo"))
    assert features({"t": [noon, None]})["t"].tolist() == [21, 24]
    assert features({"t": np.array(["2026-07-01T12"], dtype="datetime64[s]")})["t"].tolist() == [21]
    assert features({"t": ["2026-07-01 12:00:00", None]})["t"].tolist() == [21, 24]
