"""The keys that a feature makes of values that a user types, or that a caller of a lookup has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import InvalidArgument, not_allowed
from .feature_set import FeatureSet
from .jagged import Jagged
from .kinds import MultiHotFeature, NumericFeature


def keys_of_values(features: FeatureSet, name: str, values: Sequence[str]) -> npt.NDArray[np.uint64]:
    """Returns the key of each value, (n) uint64, at which its table has the row.

    It is what the feature makes of a column in training and in serving, modulo the rows of the table where the model
    takes it so.

    Args:
        features: the features of a model's version.
        name: the feature; it gives keys of one column.
        values: the values, (n), as texts: ids, numbers of buckets, times in ISO 8601. A value of a list is one element.

    Raises:
        InvalidArgument: there is no such feature, it gives no key of one column, or it refuses a value.
    """
    usable = [each for each in features.features if _is_usable(each)]
    feature = next((each for each in usable if each.name == name), None)
    if feature is None:
        raise not_allowed("feature", name, ", ".join(each.name for each in usable) or "none, as none gives keys")
    if isinstance(feature, MultiHotFeature):
        feature = feature.model_copy(update={"weights": None})
    (column,) = feature.columns
    kind = feature.cells[column]
    cells: pa.Array = pa.array(list(values), pa.string())
    if kind == "number":
        try:
            cells = cells.cast(pa.float64())
        except pa.ArrowInvalid as error:
            raise InvalidArgument(f"feature {name!r}: a value is no number: {error}") from None
    elif kind == "texts":
        cells = pa.ListArray.from_arrays(np.arange(len(values) + 1, dtype=np.int32), cells)
    found = replace(features, features=(feature,))({column: cells}, f"feature {name!r}")[name]
    if isinstance(found, Jagged):
        if (np.diff(found.offsets) != 1).any():
            row = int(np.argmax(np.diff(found.offsets) != 1))
            raise InvalidArgument(f"feature {name!r}: value {values[row]!r} gives no key, or several; allowed: one")
        found = found.values
    rows = features.rows.get(name)
    return (found if rows is None else found % rows).astype(np.uint64)


def _is_usable(feature: Any) -> bool:
    columns = 1 if isinstance(feature, MultiHotFeature) else len(feature.columns)
    return columns == 1 and not isinstance(feature, NumericFeature)
