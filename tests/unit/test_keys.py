"""What users give as keys, in training and for lookups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sparserow as sr
from sparserow.serving.client.client import as_lookup_keys
from sparserow.worker.session.keys import as_keys

BOTH = pytest.mark.parametrize("take", [as_keys, as_lookup_keys])


@BOTH
def test_integers_and_strings_are_keys(take: Callable[[Any], Any]) -> None:
    assert take([1, 2**64 - 1]).tolist() == [1, 2**64 - 1]
    assert take(["a", "b"]).tolist() == [sr.hash_key("a"), sr.hash_key("b")]
    assert take([]).shape == (0,)


@BOTH
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
def test_what_is_no_sequence_of_keys_is_refused(take: Callable[[Any], Any], given: Any, words: str) -> None:
    with pytest.raises(sr.InvalidArgument, match=words):
        take(given)
