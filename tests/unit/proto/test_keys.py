"""What users give as keys, in training and for lookups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparserow as sr
from sparserow.cpp_ext import _client
from sparserow.proto.row_keys import as_keys


def test_integers_and_strings_are_keys() -> None:
    assert as_keys([1, 2**64 - 1]).tolist() == [1, 2**64 - 1]
    assert as_keys(["a", "b"]).tolist() == [sr.hash_key("a"), sr.hash_key("b")]
    assert as_keys([]).shape == (0,)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("abc", r"keys: 'abc' is not allowed; allowed: \(n\) integers or strings, such as \['abc'\]"),
        (b"abc", r"keys: b'abc' is not allowed"),
        ([5, -1], r"keys: -1 is not allowed; allowed: \[0, 2\*\*64\)"),
        (np.array([-3]), r"keys: -3 is not allowed"),
        ([[1, 2]], r"of shape \(1, 2\) is not allowed"),
        (None, r"keys: type: 'NoneType' is not allowed; allowed: a sequence of"),
        (5, r"keys: type: 'int' is not allowed"),
        (np.array(5), r"int64 of shape \(\) is not allowed"),
        ({1: 2}, r"keys: type: 'dict' is not allowed"),
        (iter([1]), r"keys: type: 'list_iterator' is not allowed"),
        ([[1], [2, 3]], r"keys: lists of several lengths are not allowed"),
        (["a", 5], r"keys: 5 is not allowed; allowed: strings alone"),
        ([1.5], r"float64 of shape \(1,\) is not allowed"),
    ],
)
def test_what_is_no_sequence_of_keys_is_refused(given: Any, words: str) -> None:
    with pytest.raises(sr.errors.InvalidArgument, match=words):
        as_keys(given)


def test_texts_in_a_buffer_have_the_keys_of_texts_alone() -> None:
    texts = [b"", b"a", b"05db9164", *(bytes([i % 256]) * i for i in range(400))]
    offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    keys = _client.text_keys(offsets, b"".join(texts))
    assert keys.dtype == np.int64
    assert keys.tolist() == [sr.hash_key(text) for text in texts]
    assert _client.text_keys(offsets[1:4], b"".join(texts)).tolist() == [sr.hash_key(text) for text in texts[1:3]]
    assert _client.text_keys(np.zeros(1, np.int64), b"").tolist() == []


@pytest.mark.parametrize("offsets", [[0, 9], [3, 2], [-1, 2], []])
def test_places_outside_the_buffer_are_refused(offsets: list[int]) -> None:
    with pytest.raises(sr.errors.InvalidArgument, match=r"^offsets: "):
        _client.text_keys(np.array(offsets, np.int64), b"abcd")
    with pytest.raises(sr.errors.InvalidArgument, match=r"^offsets: "):
        _client.text_keys(np.array([0, 1], np.int32), b"abcd")
