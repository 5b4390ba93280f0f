"""Writes and reads the features of a published program, as files in the folder of its version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..checkpoint.folder import Folder
from ..errors import DataLoss
from ..features.document import FEATURES, features_of
from ..features.feature_set import FeatureSet
from ..row_keys import TextHasher, hash_texts
from .manifest import HashedFile
from .row_parts import read_file, write_file


def write_features(folder: Folder, files: Mapping[str, bytes]) -> tuple[HashedFile, ...]:
    """Writes the files of features, as ``features.document.files_of`` made them; returns their entries.

    Args:
        folder: the folder of the version.
        files: the files by name.
    """
    return tuple(write_file(folder, name, [data]) for name, data in files.items())


def read_features(
    folder: Folder, facts: Sequence[HashedFile], hasher: TextHasher = hash_texts
) -> tuple[FeatureSet, tuple[str, ...]] | None:
    """Returns the features of a version, and those of each argument of its program; None when it has none.

    Args:
        folder: the folder of the version.
        facts: the entries of the files in the manifest.
        hasher: makes keys of texts for the features.

    Raises:
        DataLoss: a file is missing, damaged, or does not hold features.
    """
    if not facts:
        return None
    files = {each.file: bytes(read_file(folder, each)) for each in facts}
    if FEATURES not in files:
        raise DataLoss(f"{folder.url}: is damaged: its manifest names features, and not {FEATURES}")
    return features_of(files, folder.url, hasher)
