"""What users give as keys, in training and for lookups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sparserow as sr
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
        ([1.5], r"float64 of shape \(1,\) is not allowed"),
    ],
)
def test_what_is_no_sequence_of_keys_is_refused(given: Any, words: str) -> None:
    with pytest.raises(sr.InvalidArgument, match=words):
        as_keys(given)
