"""Ids beyond int64, and texts by more dictionary entries than one chunk's indices can count."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

import sparserow as sr
from sparserow.proto.errors import InvalidArgument


def test_ids_of_64_bits_have_one_key_however_they_come() -> None:
    features = sr.features.Features([sr.features.IdFeature("user")])
    ids = [2**63, 2**64 - 1, 7]
    found = features({"user": ids})["user"].tolist()
    assert found == features({"user": np.array(ids, np.uint64)})["user"].tolist()
    assert len(set(found)) == 3


@pytest.mark.parametrize("ids", [[2**64], [-1, 2**63]])
def test_ids_that_no_type_holds_are_refused_by_the_column(ids: list[int]) -> None:
    with pytest.raises(InvalidArgument, match="column 'user': Arrow cannot take it"):
        sr.features.Features([sr.features.IdFeature("user")])({"user": ids})


def test_chunks_with_small_dictionaries_have_the_keys_of_their_texts() -> None:
    texts = [f"{chunk}{number}" for chunk in "ab" for number in range(100)]
    chunks = [
        pa.DictionaryArray.from_arrays(pa.array(range(100), pa.int8()), pa.array(texts[begin : begin + 100]))
        for begin in (0, 100)
    ]
    features = sr.features.Features([sr.features.IdFeature("user")])
    found = features({"user": pa.chunked_array(chunks)})["user"]
    assert found.tolist() == features({"user": texts})["user"].tolist()
