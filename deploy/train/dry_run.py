"""Tries a job without a cluster: reads one batch, and says what its tensors, its tables and a step will be."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray

from ...proto.config.job import JobConfig
from ...proto.config.placement_config import refusal_of_devices
from ...worker.data.features import fit
from ...worker.data.sources import check_files, feature_spec, find_files, first_samples
from ...worker.models import HashedEmbeddings
from ...worker.training.build_model import build_model, table_rows
from ..preflight.planning import MEMORY_OVERHEAD, Load, PlannedTable, plan

if TYPE_CHECKING:
    from ...worker.data.features import Features
    from ...worker.data.line_decoder import Lines

_SHOWN, _SHOWN_KEYS = 4, 2  # values of an example
_NO_BUDGET = 1 << 60


@dataclass(frozen=True)
class DryTensor:
    """A tensor that the model takes, or a column of one.

    Attributes:
        name: the name of the tensor, or of the column.
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
        name: the name of its column.
        rows: the number of rows that it can have.
        dim: the number of columns of a row.
        row_bytes: the bytes of a row with its optimizer's state and its share of the index.
        bytes: the bytes of all rows.
        is_on_servers: whether the rows live on parameter servers, as far as the job alone says.
        placement: "servers", "device" (spread over the devices of the workers), "auto" (servers or device, which the
            machines of the workers decide) or "worker" (each worker has all rows).
    """

    name: str
    rows: int
    dim: int
    row_bytes: int
    bytes: int
    is_on_servers: bool
    placement: str


@dataclass(frozen=True)
class DryRun:
    """What a job will be.

    Attributes:
        job: the name of the job.
        samples: the number of samples of the batch that was read.
        train_files, test_files: the numbers of files.
        tensors: the tensors that the model takes, and the columns of each.
        tables: the tables of the model.
        dense_parameters: the number of parameters beside the tables.
        unique_keys: the expected number of different keys of a worker's step, by Zipf's law with exponent 1.05.
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

    Args:
        job: the job.

    Raises:
        NotFound, InvalidArgument, DataLoss, FailedPrecondition: a file cannot be read, or lacks a column.
        BadLine: the beginning of the data is malformed.
    """
    spec = feature_spec(job.data)
    lines = first_samples(job.data, "train")
    batch = lines.take(slice(0, job.train.batch_size))
    features = fit(spec, [lines])
    tables = _tables(job, table_rows(job.model, spec))
    with torch.device("meta"):
        model = build_model(job.model, spec, sparse=False)
    local = {id(p) for part in model.modules() if isinstance(part, HashedEmbeddings) for p in part.parameters()}
    keys, pulled, pushed = _step(job, tables)
    return DryRun(
        job=job.name,
        samples=len(batch),
        train_files=len(find_files(job.data, "train")),
        test_files=len(check_files(job.data, "test")),
        tensors=_tensors(features, batch),
        tables=tables,
        dense_parameters=sum(p.numel() for p in model.parameters() if id(p) not in local),
        unique_keys=keys,
        pull_bytes=pulled,
        push_bytes=pushed,
        fits_statistics=spec.needs_fit,
    )


def _tensors(features: Features, batch: Lines) -> tuple[DryTensor, ...]:
    dense, sparse = features.dense(batch), features.sparse(batch)
    whole = [_tensor("dense", dense, dense[:1].ravel()), _tensor("sparse", sparse, sparse[:1].ravel())]
    whole.append(_tensor("labels", batch.labels, batch.labels))
    columns = [
        _tensor(f"{tensor}[{number}] {name}", values[:, number], values[:, number])
        for tensor, names, values in (
            ("dense", [feature.name for feature in features.spec.dense], dense),
            ("sparse", features.spec.sparse_names, sparse),
        )
        for number, name in enumerate(names)
    ]
    return (*whole, *columns)


def _tensor(name: str, values: NDArray[Any], shown: NDArray[Any]) -> DryTensor:
    return DryTensor(name, str(values.dtype), values.shape, _text(shown))


def _text(values: NDArray[Any]) -> str:
    """Returns the first values as text; a key has up to 19 digits, so only two of them are shown."""
    if values.dtype.kind == "i":
        return ", ".join(str(value) for value in values[:_SHOWN_KEYS])
    return ", ".join(f"{value:.6g}" for value in values[:_SHOWN])


def _tables(job: JobConfig, rows: dict[str, int]) -> tuple[DryTable, ...]:
    made = []
    for name, count in rows.items():
        placement = _placement(job, name) if job.model.backend == "ps" and count >= job.model.min_rows else "worker"
        is_on_servers = placement in ("servers", "auto")
        row = PlannedTable(count, job.model.dim, _optimizer_of(job)).row_bytes + (
            MEMORY_OVERHEAD if is_on_servers else 0
        )
        made.append(DryTable(name, count, job.model.dim, row, count * row, is_on_servers, placement))
    return tuple(made)


def _placement(job: JobConfig, column: str) -> str:
    """Returns where the distributed table of a column is, as the job says."""
    table = next((table for pattern, table in job.tables.items() if fnmatch.fnmatchcase(column, pattern)), None)
    if table is None or (table.placement == "auto" and refusal_of_devices(job, table) is not None):
        return "servers"
    return table.placement


def _optimizer_of(job: JobConfig) -> str:
    optimizer = job.train.row_optimizer
    return "momentum" if optimizer.kind == "sgd" and optimizer.momentum > 0 else optimizer.kind


def _step(job: JobConfig, tables: tuple[DryTable, ...]) -> tuple[float, float, float]:
    """Returns the unique keys of a worker's step, and the bytes that it pulls and pushes."""
    keys = pulled = pushed = 0.0
    load = Load(job.train.batch_size * job.train.accumulate, job.train.workers)
    for table in tables:
        if table.is_on_servers:
            planned = PlannedTable(table.rows, table.dim, _optimizer_of(job))
            made = plan(planned, load, budget_bytes=_NO_BUDGET, has_ssd=True, shards=job.cluster.shards)
            keys, pulled, pushed = keys + made.unique_keys, pulled + made.pull_bytes, pushed + made.push_bytes
    return keys, pulled, pushed
