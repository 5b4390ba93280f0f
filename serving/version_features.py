"""The features of a loaded version, which are read when a caller first gives values in place of keys."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..proto.checkpoint.folder import Folder
from ..proto.errors import FailedPrecondition, InvalidArgument, SparserowError, not_allowed
from ..proto.published.manifest import HashedFile

if TYPE_CHECKING:
    from ..proto.features.feature_set import FeatureSet

# Calls with values have threads of their own, since the first one of a version waits for files, and lookups do not.
FEATURE_THREADS = 4
_FAILED_SEC = 5.0


@dataclass(frozen=True)
class FeatureValues:
    """Values of which a version's feature makes the keys of a lookup.

    Attributes:
        feature: the name of the feature.
        values: the values, (n).
    """

    feature: str
    values: Sequence[str]

    def __len__(self) -> int:
        return len(self.values)

    @staticmethod
    def checked(feature: object, values: object, where: str) -> FeatureValues:
        """Returns values that a caller has sent.

        Raises:
            InvalidArgument: they are no texts or integers, or the name of the feature is no text.
        """
        if not isinstance(feature, str) or not isinstance(values, list):
            raise InvalidArgument(f'{where}: allowed: a list of keys, or {{"feature": NAME, "values": [VALUE, ...]}}')
        for each in values:
            if type(each) not in (str, int):
                raise not_allowed(f"{where}: values", each, "texts and integers")
            if isinstance(each, str) and not each.isascii() and any("\ud800" <= letter <= "\udfff" for letter in each):
                raise not_allowed(f"{where}: values", each, "texts of Unicode, without half of a surrogate pair")
        return FeatureValues(feature, [str(each) for each in values])


class VersionFeatures:
    """The features of one version; thread-safe. They take memory from the first call on, with their vocabularies.

    Args:
        folder: the folder of the version.
        facts: the entries of the features' files in its manifest.
        name: the version, for error texts.
    """

    def __init__(self, folder: Folder, facts: Sequence[HashedFile], name: str) -> None:
        self._folder, self._facts, self._name = folder, tuple(facts), name
        self._lock = threading.Lock()
        self._read: FeatureSet | None = None
        self._failed: tuple[float, SparserowError] | None = None  # when, and why, the last read failed

    def keys(self, asked: FeatureValues) -> NDArray[np.uint64]:
        """Returns the key of each value, (n) uint64.

        Raises:
            FailedPrecondition: the version was published without features, or this installation has no Arrow.
            InvalidArgument: see :func:`~sparserow.proto.features.value_keys.keys_of_values`.
            DataLoss: a file of the features is missing or damaged.
        """
        try:
            from ..proto.features.value_keys import keys_of_values  # which imports Arrow
        except ModuleNotFoundError as error:
            text = f"lookups by values need {error.name}, which is not installed"
            remedy = f"pip install {error.name}, or serve with the image of workers"
            raise FailedPrecondition(f"{text}; {remedy}") from error

        return keys_of_values(self._features(), asked.feature, asked.values)

    def _features(self) -> FeatureSet:
        from ..proto.published.feature_files import read_features

        with self._lock:
            if self._read is None:
                if self._failed is not None and time.monotonic() - self._failed[0] < _FAILED_SEC:
                    raise self._failed[1]  # those that waited for it would read the files one after another
                try:
                    found = read_features(self._folder, self._facts)
                except SparserowError as error:
                    self._failed = time.monotonic(), error
                    raise
                if found is None:
                    raise FailedPrecondition(f"{self._name} was published without features; look up keys")
                self._read = found[0]
            return self._read
