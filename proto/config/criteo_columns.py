"""Criteo's layout of click logs: its 13 numbers and 26 tokens, and the features that a job has of them by itself.

A number becomes ``sign(x) log(1 + |x|)``, which is defined everywhere (Criteo's counts reach -3), and a missing one 0.
A token becomes its key, and a missing one that of the empty text.
"""

from __future__ import annotations

from ..features.base import Feature
from ..features.kinds import IdFeature, NumericFeature

CRITEO_NUMERIC = tuple(f"I{number}" for number in range(1, 14))
CRITEO_CATEGORICAL = tuple(f"C{number}" for number in range(1, 27))
CRITEO_FEATURES: tuple[Feature, ...] = (
    *(NumericFeature(name=name, log1p=True) for name in CRITEO_NUMERIC),
    *(IdFeature(name=name) for name in CRITEO_CATEGORICAL),
)
