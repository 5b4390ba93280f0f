"""Sends the weights of a layer to the table that takes its place, and finds a table that has a part of them alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from rich.progress import Progress

from ...proto.control import ControlClient
from ...proto.errors import FailedPrecondition, NotFound, ResourceExhausted
from ...proto.schema import TableSchema
from ..session.session import JobSession
from ..session.table import KeyedRows

_log = logging.getLogger(__name__)

CARRY_CHUNK_BYTES = 16 << 20
_PROGRESS_FROM_BYTES = 256 << 20
_CARRY_KEY = 2**63 - 2  # beyond the rows of any layer
_CARRY_MARK = 1024.0  # exact in every dtype of rows, and far from initial ones


def is_unfinished(session: JobSession, schema: TableSchema) -> bool:
    """Returns whether a table has a part of its weights alone, as a process is sending them or ended meanwhile.

    Args:
        session: the session of a worker.
        schema: the table, which the catalog has; its shards are waited for.
    """
    try:
        mark = session.core.table(schema.name).pull([_CARRY_KEY])
    except NotFound:  # another worker is making the table: the catalog has it before all shards do
        mark = session.core.create_table(schema).pull([_CARRY_KEY])
    return bool((mark == _CARRY_MARK).all())


def drop_unfinished(session: JobSession, schema: TableSchema) -> bool:
    """Drops a table whose carry a killed process left unfinished, so that it is made anew; returns whether it was one.

    Args:
        session: the session of a worker that is about to carry weights.
        schema: the table, which exists.

    Raises:
        FailedPrecondition: another job of the namespace has workers, which may be carrying the weights now.
    """
    if not is_unfinished(session, schema):
        return False
    catalog, identity = session.core.catalog, session.core.identity
    if isinstance(catalog, ControlClient) and identity is not None:
        jobs = [job for job in catalog.status().jobs if job.namespace == session.namespace and job.members]
        other = next((job.name for job in jobs if job.job_id != identity.job_id), None)
        if other is not None:
            raise FailedPrecondition(
                f"distribute: table {schema.full_name!r} has a part of its weights alone, and job {other!r} of the "
                "namespace has workers, which may be sending them; begin again when it has them, or has ended"
            )
    _log.warning("table %s: a process ended while it sent its weights; they are sent again", schema.full_name)
    session.core.drop_table(schema.name)
    return True


def mark_unfinished(session: JobSession, schema: TableSchema) -> None:
    """Writes the row that says of a new table, until :func:`carry` ends, that it has a part of its weights alone."""
    mark = np.full((1, schema.dim), _CARRY_MARK, dtype=np.float32)
    session.core.table(schema.name).assign([_CARRY_KEY], mark)


def carry(session: JobSession, table: str, weight: torch.Tensor) -> None:
    """Sends a layer's weights to a new table, and removes the mark of :func:`mark_unfinished`.

    Args:
        session: the session of the worker.
        table: the name of the table.
        weight: the weights, (rows, dim); row i is that of key i.

    Raises:
        ResourceExhausted: a shard has no room for a single row.
    """
    rows, (total, dim) = session.core.table(table), weight.shape
    most = step = max(1, CARRY_CHUNK_BYTES // (4 * dim))
    for begin in _with_progress(total, step, f"sending {table}", 4 * weight.numel()):
        part = weight[begin : begin + step].to("cpu", torch.float32).numpy()
        most = _assign_within_budget(rows, begin, part, most)
    rows.delete([_CARRY_KEY])


def _assign_within_budget(rows: KeyedRows, begin: int, part: np.ndarray[Any, np.dtype[np.float32]], most: int) -> int:
    """Assigns rows by their number, at most ``most`` at a time, and fewer where the budget of a shard has no more room
    at once; a shard with an SSD makes room meanwhile.

    Returns:
        The number of rows that a shard has taken at once.

    Raises:
        ResourceExhausted: a shard has no room for a single row.
    """
    at = 0
    while at < len(part):
        count = min(most, len(part) - at)
        try:
            rows.assign(np.arange(begin + at, begin + at + count, dtype=np.uint64), part[at : at + count])
        except ResourceExhausted:
            if count == 1:
                raise
            most = count // 2
            continue
        at += count
    return most


def _with_progress(total: int, step: int, title: str, total_bytes: int) -> Iterator[int]:
    """Yields range(0, total, step), with a progress bar when there are many bytes to send."""
    if total_bytes < _PROGRESS_FROM_BYTES:
        yield from range(0, total, step)
        return
    with Progress(transient=True) as progress:
        task = progress.add_task(title, total=total)
        for begin in range(0, total, step):
            yield begin
            progress.update(task, completed=min(total, begin + step))
