"""Tries a job without a cluster: reads one batch, and says what its tensors, its tables and a step will be."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from ...proto.config.job import JobConfig
from ...proto.config.placement_rules import refusal_of_devices
from ...proto.config.table_config import TableConfig
from ...worker.data import Batch
from ...worker.data.batch import Lists
from ...worker.data.sources import check_samples, find_files
from ...worker.layers.distribute import layers_of_tables
from ...worker.layers.layer_swap import TableLayers
from ...worker.training.build_model import check_data, input_names, model_without_tables
from ..preflight.planning import MEMORY_OVERHEAD, Load, PlannedTable, plan
from .dry_batch import read_first_samples
from .dry_export import is_to_be_exported, try_export
from .dry_forward import TRIED_SAMPLES, try_forward

_SHOWN, _SHOWN_KEYS = 4, 2  # values of an example
_NO_BUDGET = 1 << 60


@dataclass(frozen=True)
class DryTensor:
    """A tensor that the model takes.

    Attributes:
        name: the name of the tensor.
        dtype: its dtype.
        shape: its shape, with the samples of the batch first.
        example: the first values, as text.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    example: str


@dataclass(frozen=True)
class DryTable:
    """A table of the model.

    Attributes:
        name: the name of the table.
        rows: the number of rows that it can have.
        dim: the number of columns of a row.
        row_bytes: the bytes of a row with its optimizer's state and its share of the index.
        bytes: the bytes of all rows.
        is_on_servers: whether the rows live on parameter servers, as far as the job alone says.
        placement: "servers", "device" (spread over the devices of the workers), "auto" (servers or device, which the
            machines of the workers decide) or "worker" (each worker has all rows).
        optimizer: the kind of the optimizer of its rows.
    """

    name: str
    rows: int
    dim: int
    row_bytes: int
    bytes: int
    is_on_servers: bool
    placement: str
    optimizer: str


@dataclass(frozen=True)
class DryRun:
    """What a job will be.

    Attributes:
        job: the name of the job.
        samples: the number of samples of the batch that was read.
        train_files, test_files: the numbers of files.
        tensors: the tensors that the model takes.
        tables: the tables of the model.
        dense_parameters: the number of parameters beside the tables.
        unique_keys: the expected number of different keys of a worker's step, by Zipf's law with exponent 1.05 and the
            ids of a sample in the samples that were tried.
        pull_bytes, push_bytes: the bytes of a worker's step, in both directions and for all shards.
        fits_statistics: whether a job reads the training data once more before it begins; the batch here is made with
            the statistics of its own samples.
    """

    job: str
    samples: int
    train_files: int
    test_files: int
    tensors: tuple[DryTensor, ...]
    tables: tuple[DryTable, ...]
    dense_parameters: int
    unique_keys: float
    pull_bytes: float
    push_bytes: float
    fits_statistics: bool


def dry_run(job: JobConfig) -> DryRun:
    """Reads the beginning of the training data, and computes what the job will take. No process is started.

    The model's forward and the losses of its tasks run once, on these samples and small tables of zeros. A class of the
    user's own that the job publishes or keeps is exported once.

    Args:
        job: the job.

    Raises:
        NotFound, InvalidArgument, DataLoss, FailedPrecondition: a file cannot be read, or lacks a column.
        BadLine: the beginning of the data is malformed.
        InvalidArgument: the files have no samples, or the model does not fit the data, or its forward, a loss or its
            export fails.
    """
    first = read_first_samples(job)
    spec, whole = first.spec, first.batch
    check_data(job)
    check_samples(job.data, "test")
    model = model_without_tables(job.model, spec)
    layers = layers_of_tables(model, 1, job.model.tables)
    tables = tuple(_table(job, table) for table in layers)
    local = {id(placed.layer.weight) for table in layers for placed in table.layers}
    dense = sum(p.numel() for p in model.parameters() if id(p) not in local)
    names = input_names(job.model, spec)
    tried = whole.part(0, TRIED_SAMPLES)
    counts = try_forward(job, model, names, tried, dict(spec.key_counts))
    if is_to_be_exported(job):
        try_export(job, spec, tried)
    looked_up = [sum(counts.get(id(placed.layer), 0) for placed in table.layers) / len(tried) for table in layers]
    keys, pulled, pushed = _step(job, tables, looked_up)
    return DryRun(
        job=job.name,
        samples=len(whole),
        train_files=len(find_files(job.data, "train")),
        test_files=len(find_files(job.data, "test")),
        tensors=_tensors(whole, names),
        tables=tables,
        dense_parameters=dense,
        unique_keys=keys,
        pull_bytes=pulled,
        push_bytes=pushed,
        fits_statistics=spec.needs_fit,
    )


def _tensors(batch: Batch, names: Sequence[str]) -> tuple[DryTensor, ...]:
    """Returns the tensors of a batch.

    Args:
        batch: the samples.
        names: the names of the features that the model takes.
    """
    tensors = batch.tensors
    inputs = [each for name in names for each in _named(name, tensors[name])]
    return (*inputs, *_labels(batch))


def _named(name: str, value: Tensor | Lists) -> Iterator[DryTensor]:
    if not isinstance(value, tuple):
        yield _tensor(name, value.numpy())
        return
    for part, values in zip(("values", "offsets", "weights"), value, strict=False):
        yield _tensor(f"{name}.{part}", values.numpy())


def _labels(batch: Batch) -> Iterator[DryTensor]:
    named = [(f"labels {name}", batch.label(name)) for name in batch.names.labels] or [("labels", batch.labels)]
    beside = (("sample weights", batch.weights), ("groups", batch.groups), ("times", batch.times))
    named += [(name, each) for name, each in beside if each is not None]
    for name, tensor in named:
        yield _tensor(name, tensor.numpy())


def _tensor(name: str, values: NDArray[Any]) -> DryTensor:
    return DryTensor(name, str(values.dtype), values.shape, _text(values))


def _text(values: NDArray[Any]) -> str:
    """Returns the first values as text; a key has up to 19 digits, so only two of them are shown."""
    if values.dtype.kind == "i":
        return ", ".join(str(value) for value in values[:_SHOWN_KEYS])
    return ", ".join(f"{value:.6g}" for value in values[:_SHOWN])


def _table(job: JobConfig, layers: TableLayers) -> DryTable:
    """Returns what a table of the model will take."""
    layer, name = layers.layers[0].layer, layers.name
    rows, dim = layer.num_embeddings, layer.embedding_dim
    config = next((table for pattern, table in job.tables.items() if fnmatch.fnmatchcase(name, pattern)), None)
    is_distributed = job.model.backend == "ps" and rows >= job.model.min_rows
    placement = _placement(job, config) if is_distributed else "worker"
    is_on_servers = placement in ("servers", "auto")
    optimizer = job.train.row_optimizer_of(config).row_optimizer()
    row = PlannedTable(rows, dim, optimizer).row_bytes + (MEMORY_OVERHEAD if is_on_servers else 0)
    return DryTable(name, rows, dim, row, rows * row, is_on_servers, placement, optimizer.kind)


def _placement(job: JobConfig, table: TableConfig | None) -> str:
    """Returns where a distributed table is, as the job says."""
    if table is None or (table.placement == "auto" and refusal_of_devices(job, table) is not None):
        return "servers"
    return table.placement


def _step(job: JobConfig, tables: tuple[DryTable, ...], lookups: Sequence[float]) -> tuple[float, float, float]:
    """Returns the unique keys of a worker's step, and the bytes that it pulls and pushes.

    Args:
        job: the job.
        tables: its tables.
        lookups: the ids of a sample, by table.
    """
    keys = pulled = pushed = 0.0
    samples = job.train.batch_size * job.train.accumulate
    for table, each in zip(tables, lookups, strict=True):
        if table.is_on_servers:
            load = Load(max(1, round(samples * each)), job.train.workers)
            planned = PlannedTable(table.rows, table.dim)
            made = plan(planned, load, budget_bytes=_NO_BUDGET, has_ssd=True, shards=job.cluster.shards)
            keys, pulled, pushed = keys + made.unique_keys, pulled + made.pull_bytes, pushed + made.push_bytes
    return keys, pulled, pushed
