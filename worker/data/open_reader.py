"""Readers of a job: finds the files, their formats, and the statistics of the training files."""

from __future__ import annotations

import glob
from collections.abc import Callable
from itertools import islice
from typing import Literal

from ...proto.config.job import DataConfig
from ...proto.errors import InvalidArgument, NotFound
from .criteo import criteo_format
from .features import Features, FeatureSpec, fit
from .formats import FileFormat
from .reader import ClickReader, DataFile, ReadOptions
from .table_csv import csv_format

_FIRST_LINES = 1000


def find_files(config: DataConfig, which: Literal["train", "test"]) -> tuple[DataFile, ...]:
    """The files of ``data.train`` or ``data.test``, patterns expanded in sorted order, each with its format.

    Raises:
        NotFound: a path or pattern names no file.
        InvalidArgument, DataLoss: a file is not of the format.
    """
    paths: list[str] = []
    for given in config.train if which == "train" else config.test:
        found = sorted(glob.glob(given)) if glob.has_magic(given) else [given]
        if not found:
            raise NotFound(f"data.{which}: {given}: no file has such a name")
        paths.extend(found)
    format_of = _format_of(config)
    files = tuple(DataFile(path, format_of(path)) for path in paths)
    for file in files:
        if file.format.features != files[0].format.features:
            raise InvalidArgument(f"data.{which}: {file.path} has not the columns of {files[0].path}")
    return files


def _format_of(config: DataConfig) -> Callable[[str], FileFormat]:
    schema = config.csv
    if schema is None:
        return criteo_format
    return lambda path: csv_format(schema, path)


def feature_spec(config: DataConfig) -> FeatureSpec:
    """What the model reads, from the first training file.

    Raises:
        NotFound, InvalidArgument, DataLoss: as :func:`find_files`.
    """
    return find_files(config, "train")[0].format.features


def fit_features(config: DataConfig) -> Features:
    """The transforms with statistics of the training files; one pass over them when there are any to take.

    Raises:
        BadLine: as the readers do.
        NotFound, InvalidArgument, DataLoss: as :func:`find_files`.
    """
    files = find_files(config, "train")
    spec = files[0].format.features
    options = ReadOptions(batch_size=1, on_bad_line=config.on_bad_line)
    identity = fit(FeatureSpec((), ()), ())
    return fit(spec, ClickReader(files, identity, options).raw_lines())


def check_first_lines(file: DataFile) -> None:
    """Reads the first lines of a file, with transforms that know no statistics.

    Raises:
        BadLine: one of them is malformed.
        NotFound, DataLoss: the file cannot be read.
    """
    lines = ClickReader((file,), fit(FeatureSpec((), ()), ()), ReadOptions(batch_size=1)).raw_lines()
    for _ in islice(lines, _FIRST_LINES):
        pass


def open_reader(
    config: DataConfig, which: Literal["train", "test"], features: Features, options: ReadOptions
) -> ClickReader:
    """A reader of the training or the test files, with the training files' transforms.

    Raises:
        NotFound, InvalidArgument, DataLoss: as :func:`find_files`.
    """
    files = find_files(config, which)
    if files[0].format.features != features.spec:
        raise InvalidArgument(f"data.{which}: {files[0].path} has not the columns of the training files")
    return ClickReader(files, features, options)
