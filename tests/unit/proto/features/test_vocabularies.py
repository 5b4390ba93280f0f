"""Vocabularies: their lines are hashed once, when they are read, and a call costs what its own tokens cost."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from sparserow.proto.errors import InvalidArgument
from sparserow.proto.features import vocabulary
from sparserow.proto.features.document import features_of, files_of
from sparserow.proto.features.feature_set import FeatureSet
from sparserow.proto.features.kinds import IdFeature, SequenceFeature
from sparserow.proto.features.vocabulary import Vocabulary
from sparserow.proto.row_keys import hash_texts

LINES = 5000
WORDS = "".join(f"item {number}\n" for number in range(LINES)).encode()
FEATURES = (IdFeature("item", vocabulary="words"), SequenceFeature("seen", vocabulary="words", max_len=9))
ROW = {"item": ["item 7"], "seen": [["item 4999", "another", "item 0"]]}


class Counting:
    """A hasher that counts the texts that it is given."""

    def __init__(self) -> None:
        self.texts = 0

    def __call__(self, offsets: npt.NDArray[np.int64], texts: Any) -> npt.NDArray[np.int64]:
        self.texts += len(offsets) - 1
        return hash_texts(offsets, texts)


def check_row(features: FeatureSet, counting: Counting) -> None:
    for _ in range(3):
        counting.texts = 0
        found = features(ROW)
        assert found["item"].tolist() == [8]
        assert found["seen"].values.tolist() == [5000, 0, 1]
        assert counting.texts <= 4 + 2, "the row's tokens, and each feature's default"


def test_a_row_is_hashed_and_not_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    counting, reads = Counting(), []

    def index_in(*_: Any, **__: Any) -> None:
        pytest.fail("Arrow hashes the whole value set at each call")

    monkeypatch.setattr(vocabulary.pc, "index_in", index_in)

    def read(path: str) -> bytes:
        reads.append(path)
        return WORDS

    features = FeatureSet.of(FEATURES, read, counting)
    assert reads == ["words"], "two features share a vocabulary"
    assert counting.texts == LINES
    check_row(features, counting)
    files = files_of(features, ("item", "seen"))
    counting.texts = 0
    published, _ = features_of(files, "v1", counting)
    assert counting.texts == LINES
    check_row(published, counting)


def few_hashes(count: int) -> Callable[[npt.NDArray[np.int64], Any], npt.NDArray[np.int64]]:
    return lambda offsets, texts: hash_texts(offsets, texts) % count


@pytest.mark.parametrize("hashes", [1, 3, 50, 1 << 62])
def test_tokens_of_one_hash_have_their_own_keys(hashes: int) -> None:
    draw = random.Random(hashes)
    words = list({"".join(draw.choices("ab\rä ", k=draw.randrange(7))) for _ in range(60)})
    draw.shuffle(words)
    words = [word for word in words if not word.endswith("\r")]
    found = Vocabulary(
        "".join(word + draw.choice(["\n", "\r\n"]) for word in words).encode(), "words", few_hashes(hashes)
    )
    assert len(found) == len(words)
    asked = [*words, "absent", "a b a", *draw.choices(words, k=20)]
    lines = found.lines(pa.array([word.encode() for word in asked], pa.large_binary()))
    assert lines.tolist() == [words.index(word) if word in words else -1 for word in asked]
    assert found.lines(pa.array([], pa.large_binary())).tolist() == []


@pytest.mark.parametrize("hashes", [1, 1 << 62])
def test_the_first_line_that_repeats_another_is_named(hashes: int) -> None:
    for data, message in ((b"a\nb\nc\nb\na\n", "line 4 repeats line 2, 'b'"), (b"\n\r\n", "line 2 repeats line 1, ''")):
        with pytest.raises(InvalidArgument, match=f"vocabulary words: {message}"):
            Vocabulary(data, "words", few_hashes(hashes))
    with pytest.raises(InvalidArgument, match="the file has no line"):
        Vocabulary(b"", "words", few_hashes(hashes))
    assert len(Vocabulary(b"\n", "words", few_hashes(hashes))) == 1
    assert len(Vocabulary(b"a\nb\r", "words", few_hashes(hashes))) == 2
