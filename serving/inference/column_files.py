"""Reads the columns of features from a file, in batches of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.dataset as pa_dataset

from ...proto.errors import DataLoss, InvalidArgument, NotFound
from ...proto.features.feature_set import FeatureSet
from ...proto.features.kinds import BucketizedFeature, NumericFeature

_FORMATS = {".parquet": "parquet", ".orc": "orc", ".arrow": "feather", ".feather": "feather", ".jsonl": "json"}


def read_columns(
    path: Path, features: FeatureSet, batch_rows: int, *, keep: Sequence[str] = (), nulls: bool = False
) -> Iterator[pa.Table]:
    """Yields the columns of features from a file, one batch of rows at a time.

    The end of the name tells the format: .parquet, .orc, .arrow, .feather, .jsonl; any other is CSV with a header. A
    column of a CSV file is read as numbers when only features of numbers read it, and as texts otherwise.

    Args:
        path: the path of the file.
        features: the features; their columns are read.
        batch_rows: the number of rows of a batch at most.
        keep: other columns that are read as well.
        nulls: whether a column that the file lacks is a column of nulls, which features have defaults for.

    Raises:
        NotFound: the file does not exist.
        InvalidArgument: the file lacks a column, or a value of a CSV file is no number.
        DataLoss: the file is damaged.
    """
    if not path.is_file():
        raise NotFound(f"--input {path}: the file does not exist")
    try:
        source = pa_dataset.dataset(path, format=_FORMATS.get(path.suffix) or _csv_of(features))
        names = ", ".join(source.schema.names)
        for name in keep:
            if name not in source.schema.names:
                raise InvalidArgument(f"--keep {name}: {path} has no such column; columns: {names}")
        absent = [name for name in features.columns if name not in source.schema.names]
        if absent and (not nulls or len(absent) == len(features.columns)):
            raise InvalidArgument(
                f"{path}: there is no column {absent[0]!r}, which the features read; columns: {names}"
            )
        there = dict.fromkeys([*(name for name in features.columns if name not in absent), *keep])
        for batch in source.to_batches(columns=list(there), batch_size=batch_rows):
            if batch.num_rows:
                table = pa.Table.from_batches([batch])
                for name in absent:
                    table = table.append_column(name, pa.nulls(len(table)))
                yield table
    except (pa.ArrowInvalid, OSError) as error:
        kind = InvalidArgument if path.suffix not in _FORMATS else DataLoss
        raise kind(f"{path}: {' '.join(str(error).split())}") from None


def _csv_of(features: FeatureSet) -> pa_dataset.CsvFileFormat:
    numbers = {
        name
        for feature in features.features
        if isinstance(feature, NumericFeature | BucketizedFeature)
        for name in feature.columns
    }
    texts = {
        name
        for feature in features.features
        if not isinstance(feature, NumericFeature | BucketizedFeature)
        for name in feature.columns
    }
    types = {name: pa.float64() for name in numbers} | {name: pa.string() for name in texts}
    return pa_dataset.CsvFileFormat(convert_options=pa_csv.ConvertOptions(column_types=types))
