"""Opens the readers of a job: finds and plans its files, and computes statistics of the training files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeAlias, TypeVar

import pyarrow as pa

from ....proto.config.data_config import DataConfig
from ....proto.config.row_filter import parse_where
from ....proto.errors import InvalidArgument, not_allowed
from ....proto.features.statistics import Statistics
from ....proto.process.lone_work import lone_work
from ..batch import Batch
from ..candidates import ItemTable, count_items
from ..criteo import COLUMNS, criteo_format
from ..decoded import Lines
from ..event_decoder import EventDecoder, json_line, text_line
from ..features import FeatureSpec, FittedFeatures, fit
from ..formats import FileFormat
from ..reader import ClickReader, ReadOptions
from ..source import PlannedFile, Source, no_samples
from ..storage import find_paths
from ..table_csv import csv_format, names_of, with_names
from .feature_columns import FeatureDecoder, feature_set, roles_of
from .hive import Partitions
from .lines import LineSource
from .protobuf_values import ProtobufValues
from .roles import ColumnRoles, check_columns
from .table_formats import table_format
from .tables import TableSource

_FILES_AT_ONCE = 16  # whose footers are read, as each may be a round trip to an object store

Which: TypeAlias = Literal["train", "test"]
Value = TypeVar("Value")


def find_files(config: DataConfig, which: Which) -> tuple[str, ...]:
    """Returns the files of ``data.train`` or ``data.test``; patterns and folders are expanded in sorted order.

    Raises:
        NotFound: a path, folder or pattern names no file.
        InvalidArgument, FailedPrecondition: a URL cannot be opened.
    """
    return find_paths(config.files(which), config.setting(which))


def feature_spec(config: DataConfig) -> FeatureSpec:
    """Returns the inputs that the model reads, from the first training file.

    Raises:
        NotFound, InvalidArgument, DataLoss: see :func:`check_files`.
    """
    paths = find_files(config, "train")
    return _sources(config, paths)().spec(paths[0])


def check_files(config: DataConfig, which: Which) -> tuple[str, ...]:
    """Checks that the files exist and have the columns of the job; returns their paths.

    Raises:
        NotFound: a path, folder or pattern names no file, or a file cannot be read.
        InvalidArgument, DataLoss: a file does not have the format, or its columns differ from those of the first file.
        FailedPrecondition: the storage refuses.
    """
    paths = find_files(config, which)
    made = _sources(config, paths)
    _check_alike(config.setting(which), paths, _of_each(paths, lambda path: made().spec(path)))
    return paths


def plan_files(
    config: DataConfig, which: Which, known: Mapping[str, PlannedFile] | None = None
) -> tuple[PlannedFile, ...]:
    """Returns the files of ``data.train`` or ``data.test`` with their parts, which all workers of a job must share.

    Texts are read once for it, of other files their footers, and the columns of ``data.where`` where statistics do not
    show which rows it selects.

    Args:
        config: the job's data section.
        which: "train" or "test".
        known: files that are not planned here, by path; None: there are none.

    Raises:
        NotFound, InvalidArgument, DataLoss, FailedPrecondition: see :func:`check_files`.
    """
    paths = find_files(config, which)
    made, plans = _sources(config, paths), known or {}

    def planned(path: str) -> tuple[FeatureSpec, PlannedFile]:
        source = made()
        return source.spec(path), plans[path] if path in plans else source.plan(path)

    found = _of_each(paths, planned)
    _check_alike(config.setting(which), paths, [spec for spec, _ in found])
    return tuple(file for _, file in found)


def _check_alike(setting: str, paths: Sequence[str], specs: Sequence[FeatureSpec]) -> None:
    for path, spec in zip(paths, specs, strict=True):
        if spec != specs[0]:
            raise InvalidArgument(f"{setting}: {path} does not have the columns of {paths[0]}")


def fit_features(
    config: DataConfig, plan: Sequence[PlannedFile] | None = None, known: Mapping[str, Statistics] | None = None
) -> FittedFeatures:
    """Returns the transforms with the statistics of the training files, which are read once if any are needed.

    Args:
        config: the job's data section.
        plan: the training files with their parts; None: they are planned here.
        known: statistics that are not computed, by the name of a feature; None: there are none.

    Raises:
        BadLine: a line or row is malformed, and such ones are not skipped.
        NotFound, InvalidArgument, DataLoss, FailedPrecondition: see :func:`check_files`.
    """
    files = tuple(plan if plan is not None else plan_files(config, "train"))
    source = _sources(config, [file.path for file in files])()
    spec = source.spec(files[0].path)
    return fit(spec, _samples(source, files), known)


def spec_of(config: DataConfig, plan: Sequence[PlannedFile]) -> FeatureSpec:
    """Returns the inputs that the model reads.

    Args:
        config: the job's data section.
        plan: the training files.
    """
    return _sources(config, [file.path for file in plan])().spec(plan[0].path)


def item_table(
    config: DataConfig, item: str, *, weighted: bool, plan: Sequence[PlannedFile] | None = None
) -> ItemTable:
    """Returns the items of the training files, which are read once for it.

    Args:
        config: the job's data section.
        item: the feature or column with the key of a sample's item.
        weighted: whether the weight of an item is the number of its samples; False: it is 1.
        plan: the training files with their parts; None: they are planned here.

    Raises:
        InvalidArgument: there is no such feature or column of keys, or it has fewer than two different keys.
        BadLine: a line or row is malformed, and such ones are not skipped.
        NotFound, DataLoss, FailedPrecondition: see :func:`check_files`.
    """
    files = tuple(plan if plan is not None else plan_files(config, "train"))
    source = _sources(config, [file.path for file in files])()
    names = source.spec(files[0].path).categorical
    if item not in names:
        raise not_allowed("item", item, ", ".join(names))
    column = names.index(item)
    return count_items((lines.keys[:, column] for lines in _samples(source, files)), item, weighted=weighted)


def _samples(source: Source, plan: Sequence[PlannedFile]) -> Iterator[Lines]:
    count = 0
    for file in plan:
        for part in range(len(file.rows)):
            lines = source.read(file, part).lines
            yield lines
            count += len(lines.keys)
            lone_work.progress(f"{count:,} samples")


def check_first_samples(config: DataConfig, which: Which) -> int:
    """Checks the beginning of each file of ``data.train`` or ``data.test``, without statistics; returns their number.

    Raises:
        BadLine: a line or row there is malformed.
        InvalidArgument: the files have no samples.
        NotFound, InvalidArgument, DataLoss, FailedPrecondition: see :func:`check_files`.
    """
    paths, source = _strict_source(config, which)
    if not sum([len(source.first(path)) for path in paths]):
        _first_of(source, paths)
    return len(paths)


def first_samples(config: DataConfig, which: Which) -> Lines:
    """Returns the first samples of ``data.train`` or ``data.test``, at least one; none is skipped.

    Raises:
        BadLine: a line or row before them is malformed.
        InvalidArgument: the files have no samples.
        NotFound, InvalidArgument, DataLoss, FailedPrecondition: see :func:`check_files`.
    """
    paths, source = _strict_source(config, which)
    return _first_of(source, paths)


def check_samples(config: DataConfig, which: Which) -> None:
    """Checks that ``data.train`` or ``data.test`` has a sample; malformed ones are skipped where the job skips them.

    Raises:
        InvalidArgument: the files have no samples.
        BadLine, NotFound, InvalidArgument, DataLoss, FailedPrecondition: see :func:`first_samples`.
    """
    paths = check_files(config, which)
    _first_of(_sources(config, paths)(), paths)


def _first_of(source: Source, paths: Sequence[str]) -> Lines:
    for path in paths:
        if len(lines := source.first(path)):
            return lines
    for path in paths:  # of which data.where may select later rows alone
        for lines in _samples(source, [source.plan(path)]):
            if len(lines):
                return lines
    raise no_samples(paths[0])


def _strict_source(config: DataConfig, which: Which) -> tuple[tuple[str, ...], Source]:
    """Returns the checked files, and a source that skips no malformed line or row of them."""
    paths = check_files(config, which)
    return paths, _sources(config.model_copy(update={"on_bad_line": "error"}), paths)()


def open_reader(
    config: DataConfig,
    which: Which,
    features: FittedFeatures,
    options: ReadOptions,
    plan: Sequence[PlannedFile] | None = None,
    made: Callable[[Batch], Any] | None = None,
) -> ClickReader[Any]:
    """Returns a reader of the training or the test files.

    Args:
        config: the job's data section.
        which: "train" or "test".
        features: the transforms, with the statistics of the training files.
        options: the options by which samples are dealt.
        plan: the files with their parts, the same for all workers; None: they are planned here.
        made: gives what the reader yields for a batch, such as :meth:`NamedBatch.of`; None: the batch.

    Raises:
        NotFound, InvalidArgument, DataLoss, FailedPrecondition: see :func:`check_files`.
    """
    files = tuple(plan if plan is not None else plan_files(config, which))
    source = _sources(config, [file.path for file in files])()
    if source.spec(files[0].path) != features.spec:
        raise InvalidArgument(
            f"{config.setting(which)}: {files[0].path} does not have the columns of the training files"
        )
    return ClickReader(source, files, features, options, made or _as_it_is)


def file_source(config: DataConfig) -> Source:
    """Returns what reads files with the columns of the training files.

    Raises:
        NotFound, InvalidArgument, DataLoss, FailedPrecondition: see :func:`check_files`.
    """
    return _sources(config, find_files(config, "train"))()


def event_decoder(config: DataConfig) -> EventDecoder:
    """Returns what decodes the events of ``data.stream`` as lines of its files ``like``.

    Raises:
        NotFound, InvalidArgument, DataLoss, FailedPrecondition: see :func:`check_files`.
    """
    paths = find_files(config, "train")
    source = _sources(config.model_copy(update={"on_bad_line": "skip"}), paths)()
    assert isinstance(source, LineSource | TableSource)
    kafka = None if config.stream is None else config.stream.kafka
    if kafka is not None and kafka.protobuf is not None:
        return EventDecoder(source, paths[0], ProtobufValues(kafka.protobuf).line_of)
    return EventDecoder(source, paths[0], json_line if config.format == "jsonl" else text_line)


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _of_each(paths: Sequence[str], call: Callable[[str], Value]) -> list[Value]:
    """Returns the result of a call for each path, in order; calls for several paths run at the same time."""
    if len(paths) == 1:
        return [call(paths[0])]
    with ThreadPoolExecutor(min(_FILES_AT_ONCE, len(paths))) as threads:
        return list(threads.map(call, paths))


def _sources(config: DataConfig, paths: Sequence[str]) -> Callable[[], Source]:
    """Returns what makes sources of some files, one for each thread; the first file shows the names of columns."""
    samples = config.samples if config.csv is None else with_names(config.csv, paths[0])
    features = feature_set(config.features)
    roles = roles_of(samples, features)
    decoder = FeatureDecoder(roles, features, config.on_bad_line, is_text=config.columns is None)
    if config.columns is None:
        return lambda: LineSource(_line_format(config, roles), decoder, config.on_bad_line)
    where = None if config.where is None else parse_where(config.where)
    partitions = Partitions(paths)
    return lambda: TableSource(table_format(config.format), decoder, where, partitions, config.on_bad_line)


def _line_format(config: DataConfig, roles: ColumnRoles) -> Callable[[str], FileFormat]:
    """Returns what finds the format of a file of text, after checking that the file has the columns of the roles."""
    schema = config.csv

    def format_of(path: str) -> FileFormat:
        names = COLUMNS if schema is None else names_of(schema, path)
        check_columns(roles, (), pa.schema([(name, pa.null()) for name in names]), path)
        return criteo_format(path, roles.uses) if schema is None else csv_format(schema, path, roles.uses)

    return format_of
