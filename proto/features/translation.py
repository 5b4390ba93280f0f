"""Translates columns that a job names by their use, ``numeric``, ``categorical`` and ``buckets``, to features.

The translated features give the same numbers and keys, bit for bit, as the uses are documented to give:

* ``log``: ``sign(x) log(1 + |x|)``, which is defined everywhere (Criteo's counts reach -3).
* ``standardize``: ``(x - mean) / std`` over the training files, after ``log`` when both are asked for.
* A missing number becomes 0 after these transforms, which is the mean when it is standardised.
* A text, or an integer by its text, becomes its key; a missing one has that of the empty text.
* A bucket is the number of its quantile bucket, and ``buckets`` for a missing number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .base import Feature
from .kinds import BucketizedFeature, IdFeature, NumericFeature


def features_of_columns(
    numeric: Mapping[str, str], categorical: Sequence[str], buckets: Mapping[str, int]
) -> tuple[Feature, ...]:
    """Returns the features of columns: numbers, then keys, then buckets.

    A feature has the name of its column, of whatever characters; that of a bucket ends in ``_bucket``.

    Args:
        numeric: the transform of each column of numbers: "none", "log", "standardize" or "log_standardize".
        categorical: the columns of keys.
        buckets: the number of quantile buckets of each column.
    """
    numbers = [
        _named(
            NumericFeature(
                name="number",
                log1p=transform.startswith("log"),
                scale="standardize" if transform.endswith("standardize") else "none",
            ),
            name,
        )
        for name, transform in numeric.items()
    ]
    keys = [_named(IdFeature(name="key"), name) for name in categorical]
    cut = [
        _named(BucketizedFeature(name="bucket", column=name, quantiles=count), f"{name}_bucket")
        for name, count in buckets.items()
    ]
    return (*numbers, *keys, *cut)


def _named(feature: Feature, name: str) -> Feature:
    """Returns a feature under a name that need not be the name of an argument, as matrices have no names."""
    return feature.model_copy(update={"name": name})
