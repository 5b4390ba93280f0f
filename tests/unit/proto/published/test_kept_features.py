"""Features beside a kept program: they are found again, and only with the program that they belong to."""

from __future__ import annotations

from pathlib import Path

import pytest

import sparserow as sr
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.features.document import FEATURES, features_of, files_of
from sparserow.proto.published.kept_features import keep_features, kept_features


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    (tmp_path / "words.txt").write_text("a\nb\n")
    words = str(tmp_path / "words.txt")
    made = sr.features.Features(
        [sr.features.IdFeature("word", vocabulary=words), sr.features.IdFeature("other", vocabulary=words)]
    )
    return files_of(made.set, ("word", "other"))


def test_features_hold_no_path_of_the_publisher(tmp_path: Path, files: dict[str, bytes]) -> None:
    assert set(files) == {FEATURES, "vocabulary.0.txt"}
    assert str(tmp_path) not in files[FEATURES].decode()
    read, _ = features_of(files, "v1")
    assert [feature.vocabulary for feature in read.features] == ["vocabulary.0.txt"] * 2  # type: ignore[attr-defined]


def test_kept_features_are_found_with_their_program(tmp_path: Path, files: dict[str, bytes]) -> None:
    folder = Folder(str(tmp_path / "ctr.features"))
    with pytest.raises(sr.errors.NotFound, match=r"ctr\.features/features\.json: the file does not exist"):
        kept_features(folder, b"program")
    keep_features(folder, files, b"program")
    assert kept_features(folder, b"program") == files
    assert next(iter(kept_features(folder, b"program"))) == FEATURES
    with pytest.raises(sr.errors.FailedPrecondition, match=r"ctr\.features: the features belong to another program"):
        kept_features(folder, b"another")


def test_a_program_without_features_forgets_those_before(tmp_path: Path, files: dict[str, bytes]) -> None:
    folder = Folder(str(tmp_path / "ctr.features"))
    keep_features(folder, {}, b"program")
    assert not Path(folder.path).exists()
    keep_features(folder, files, b"program")
    (Path(folder.path) / "notes.txt").write_text("of someone else")
    keep_features(folder, {}, b"program")
    with pytest.raises(sr.errors.NotFound):
        kept_features(folder, b"program")
    assert (Path(folder.path) / "notes.txt").exists()


def test_a_lost_vocabulary_is_named(tmp_path: Path, files: dict[str, bytes]) -> None:
    folder = Folder(str(tmp_path / "ctr.features"))
    keep_features(folder, files, b"program")
    folder.delete("vocabulary.0.txt")
    with pytest.raises(sr.errors.DataLoss, match=r"features\.json: is damaged: .*vocabulary\.0\.txt"):
        kept_features(folder, b"program")
