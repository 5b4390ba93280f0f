"""Opens the readers of a job: finds the files and their formats, and computes statistics of the training files."""

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
    """Returns the files of ``data.train`` or ``data.test``, each with its format.

    Patterns are expanded in sorted order.

    Raises:
        NotFound: a path or pattern names no file.
        InvalidArgument, DataLoss: a file does not have the format, or its columns differ from those of the first file.
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
            raise InvalidArgument(f"data.{which}: {file.path} does not have the columns of {files[0].path}")
    return files


def _format_of(config: DataConfig) -> Callable[[str], FileFormat]:
    schema = config.csv
    if schema is None:
        return criteo_format
    return lambda path: csv_format(schema, path)


def feature_spec(config: DataConfig) -> FeatureSpec:
    """Returns the inputs that the model reads, from the first training file.

    Raises:
        NotFound, InvalidArgument, DataLoss: see :func:`find_files`.
    """
    return find_files(config, "train")[0].format.features


def fit_features(config: DataConfig) -> Features:
    """Returns the transforms with the statistics of the training files, which are read once if any are needed.

    Raises:
        BadLine: a line is malformed, and such lines are not skipped.
        NotFound, InvalidArgument, DataLoss: see :func:`find_files`.
    """
    files = find_files(config, "train")
    spec = files[0].format.features
    options = ReadOptions(batch_size=1, on_bad_line=config.on_bad_line)
    identity = fit(FeatureSpec((), ()), ())
    return fit(spec, ClickReader(files, identity, options).raw_lines())


def check_first_lines(file: DataFile) -> None:
    """Checks the first 1,000 data lines of a file, without statistics.

    Raises:
        BadLine: one of the lines is malformed.
        NotFound, DataLoss: the file cannot be read.
    """
    lines = ClickReader((file,), fit(FeatureSpec((), ()), ()), ReadOptions(batch_size=1)).raw_lines()
    for _ in islice(lines, _FIRST_LINES):
        pass


def open_reader(
    config: DataConfig, which: Literal["train", "test"], features: Features, options: ReadOptions
) -> ClickReader:
    """Returns a reader of the training or the test files.

    Args:
        config: the job's data section.
        which: "train" or "test".
        features: the transforms, with the statistics of the training files.
        options: the options by which samples are dealt.

    Raises:
        NotFound, InvalidArgument, DataLoss: see :func:`find_files`.
    """
    files = find_files(config, which)
    if files[0].format.features != features.spec:
        raise InvalidArgument(f"data.{which}: {files[0].path} does not have the columns of the training files")
    return ClickReader(files, features, options)
