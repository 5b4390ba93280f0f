"""Makes the arguments of a published program of columns. Arrow is imported where a version has features alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...cpp_ext import _client
from ...cpp_ext.torch_arrays import tensor_of
from ...proto.checkpoint.folder import Folder
from ...proto.features.jagged import Jagged
from ...proto.published.manifest import HashedFile

if TYPE_CHECKING:
    from ...proto.features.compute import Array
    from ...proto.features.feature_set import FeatureSet


def features_of_version(folder: Folder, facts: Sequence[HashedFile]) -> tuple[FeatureSet | None, tuple[str, ...]]:
    """Returns the features of a version, and that of each argument of its program; (None, ()) when it has none.

    Args:
        folder: the folder of the version.
        facts: the entries of the features' files in its manifest.

    Raises:
        DataLoss: a file is missing, damaged, or does not hold features.
    """
    if not facts:
        return None, ()
    from ...proto.published.feature_files import read_features

    return read_features(folder, facts, _client.text_keys) or (None, ())


def is_of_columns(argument: Any) -> bool:
    """Returns whether an argument is a mapping, or a table or record batch of Arrow, which is not imported for it."""
    if isinstance(argument, Mapping):
        return True
    arrow = sys.modules.get("pyarrow")
    return arrow is not None and isinstance(argument, arrow.Table | arrow.RecordBatch)


def arguments_of(features: FeatureSet, names: Sequence[str], columns: Any) -> tuple[Any, ...]:
    """Returns the arguments of a program.

    Args:
        features: the features of its version.
        names: the feature of each argument.
        columns: a table, a record batch or a mapping with the columns.

    Raises:
        InvalidArgument: a column is missing or does not fit; the text names it.
    """
    arrays = features(columns, "ServedModel")
    return tuple(_argument(arrays[name]) for name in names)


def _argument(array: Array) -> Any:
    return tuple(map(tensor_of, array.parts)) if isinstance(array, Jagged) else tensor_of(array)
