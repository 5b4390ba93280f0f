"""Prepares the swap of embeddings for distributed layers: the tables' schemas, their first rows, and the layers."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from rich.progress import Progress
from torch import nn

from ...proto.errors import FailedPrecondition, InvalidArgument, SparserowError
from ...proto.schema import Normal, Table, TableSchema
from ..session.row_optimizers import OptimizerLike, row_optimizer_of
from ..session.session import Session
from ..session.tensor_group import on_leader
from .deferred import deferred_init
from .embedding import BAG_MODES, DistributedEmbedding, DistributedEmbeddingBag

_log = logging.getLogger(__name__)
Layer = nn.Embedding | nn.EmbeddingBag
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

CARRY_CHUNK_BYTES = 16 << 20
_PROGRESS_FROM_BYTES = 256 << 20
_MOST_NAMED = 5


@dataclass(frozen=True)
class Swap:
    """One layer to swap, with its place in the model and the schema of its table.

    Attributes:
        paths: every path of the layer in the model; the first is the table's name.
        layer: the layer to swap.
        schema: the schema of its table, without an id.
        is_carried: whether the layer's weights are sent to the table when the table is new.
        on_devices: whether the rows are to be on the devices of the ranks.
    """

    paths: tuple[str, ...]
    layer: Layer
    schema: TableSchema
    is_carried: bool
    on_devices: bool = False


def plan_tables(
    layers: Sequence[tuple[Layer, list[str]]],
    session: Session,
    *,
    what: str,
    optimizer: OptimizerLike,
    tables: Mapping[str, Table],
    carry_weights: bool,
) -> list[Swap]:
    """Plans the table of each layer, which is named after the layer's first path.

    Args:
        layers: each layer with its paths in the model.
        session: the session that will bind the tables.
        what: the name of the calling function, for error texts.
        optimizer: the row optimizer of tables that have none of their own.
        tables: options by ``fnmatch`` pattern on the path; the first matching pattern counts.
        carry_weights: whether weights are sent to tables that are new.

    Raises:
        InvalidArgument: a pattern of ``tables`` matches no path, or an optimizer has no counterpart on the servers.
        FailedPrecondition: the session has bound a table of that name already.
    """
    default = row_optimizer_of(optimizer, f"{what}.optimizer")
    own = {
        pattern: row_optimizer_of(table.optimizer, f"{what}: tables[{pattern!r}].optimizer")
        for pattern, table in tables.items()
        if table.optimizer is not None
    }
    is_used = dict.fromkeys(tables, False)
    bound = set(session.core.bound_tables())
    swaps = []
    for layer, paths in layers:
        if paths[0] in bound:
            raise FailedPrecondition(f"table {paths[0]!r} is already in use by this session; use another namespace")
        matching = [pattern for pattern in tables if fnmatch.fnmatchcase(paths[0], pattern)]
        is_used.update(dict.fromkeys(matching, True))
        table = tables[matching[0]] if matching else Table()
        schema = TableSchema(
            namespace=session.namespace,
            name=paths[0],
            dim=layer.embedding_dim,
            optimizer=own.get(matching[0], default) if matching else default,
            dtype=table.dtype or "float32",
            init=table.init or deferred_init(layer) or Normal(0.0, 1.0),
            seed=table.seed or 0,
            policy=table.policy,
        )
        is_carried = carry_weights and table.init is None and not layer.weight.is_meta
        swaps.append(Swap(tuple(paths), layer, schema, is_carried, table.placement == "device"))
    for pattern, is_matched in is_used.items():
        if not is_matched:
            names = ", ".join(paths[0] for _, paths in layers)
            raise InvalidArgument(f"{what}: tables[{pattern!r}] matches no layer; layers to distribute: {names}")
    return swaps


def refusal_of_lookup(max_norm: float | None, scale_grad_by_freq: bool) -> str | None:
    """Returns why a lookup with these options of torch cannot be distributed; None when it can."""
    if max_norm is not None:
        return "max_norm renormalises rows in place at each lookup"
    if scale_grad_by_freq:
        return "scale_grad_by_freq needs counts over the whole batch of all workers"
    return None


def refusal_of_weight(weight: torch.Tensor) -> str | None:
    """Returns the property of the weight that keeps its rows from being distributed; None when they can be."""
    if not weight.requires_grad:
        return "frozen (requires_grad=False): keep it local"
    return None if weight.dtype in _WEIGHT_DTYPES else str(weight.dtype)


def distributed_layer_of(
    layer: Layer,
    schema: TableSchema,
    origins: list[str],
    kinds: tuple[type[DistributedEmbedding], type[DistributedEmbeddingBag]] = (
        DistributedEmbedding,
        DistributedEmbeddingBag,
    ),
) -> DistributedEmbedding | DistributedEmbeddingBag:
    """Makes the distributed layer that replaces ``layer``, with its results on the device of the layer's weight.

    Args:
        layer: the layer to replace, whose options are copied.
        schema: the schema of its table.
        origins: ids of the clusters whose rows the table holds; the list is shared.
        kinds: the classes of distributed layers.
    """
    distributed: DistributedEmbedding | DistributedEmbeddingBag
    if isinstance(layer, nn.EmbeddingBag):
        assert layer.mode in BAG_MODES
        distributed = kinds[1](
            schema.full_name,
            num_embeddings=layer.num_embeddings,
            embedding_dim=layer.embedding_dim,
            padding_idx=layer.padding_idx,
            dtype=layer.weight.dtype,
            mode=layer.mode,
            include_last_offset=bool(layer.include_last_offset),
            origins=origins,
        )
    else:
        distributed = kinds[0](
            schema.full_name,
            num_embeddings=layer.num_embeddings,
            embedding_dim=layer.embedding_dim,
            padding_idx=layer.padding_idx,
            dtype=layer.weight.dtype,
            origins=origins,
        )
    if not layer.weight.is_meta:
        distributed.to(layer.weight.device)
    return distributed.train(layer.training)


def create_on_first_rank(session: Session, swaps: list[Swap]) -> list[TableSchema]:
    """Creates the tables on every rank and returns their schemas, with ids. Followers of a tensor group get them.

    Rank 0 goes first and writes the first rows, so that no other rank reads a table before its rows are there.
    """
    group = session.core.tensor_group
    is_group = session.core.is_distributed and dist.is_available() and dist.is_initialized()
    failure: SparserowError | None = None
    made: list[TableSchema] = []
    if (session.rank == 0 or not is_group) and (group is None or group.leads):
        try:
            made = _create(session, swaps, has_rows=session.rank == 0)
        except SparserowError as error:
            failure = error
    if is_group:
        outcome: list[str | None] = [None if failure is None else str(failure)]
        dist.broadcast_object_list(outcome, src=0)
        if failure is None and outcome[0] is not None:
            failure = FailedPrecondition(f"distribute failed on rank 0: {outcome[0]}")
    if failure is not None:
        raise failure
    return on_leader(group, lambda: made or [session.core.catalog.create_table(swap.schema) for swap in swaps])


def _create(session: Session, swaps: list[Swap], *, has_rows: bool) -> list[TableSchema]:
    existing = {schema.name for schema in session.core.catalog.list_tables(session.namespace)}
    made = [session.core.catalog.create_table(swap.schema) for swap in swaps]
    if has_rows:
        _tell_of_found(session, [schema.name for schema in made if schema.name in existing], len(made))
    for swap, schema in zip(swaps, made, strict=True):
        if not has_rows:
            continue
        if schema.name in existing:
            continue
        if swap.is_carried:
            _carry(session, swap)
        elif isinstance(swap.layer, nn.Embedding) and swap.layer.padding_idx is not None:
            padding = np.array([swap.layer.padding_idx], dtype=np.uint64)
            session.table(schema.name).assign(padding, np.zeros((1, schema.dim), dtype=np.float32))
    return made


def _tell_of_found(session: Session, names: list[str], count: int) -> None:
    """Logs one line about the tables that existed before the job, unless a ``namespace_policy`` was given."""
    rows = session.core.found_tables or {}
    names = [name for name in names if name in rows]
    if not names:
        return
    named = [name if rows[name] is None else f"{name} ({rows[name]:,} rows)" for name in names[:_MOST_NAMED]]
    _log.warning(
        "namespace %r: %d of the %d tables were there before: %s%s; training continues with their rows, and the "
        "model's weights are not sent (namespace_policy='new' refuses such tables, 'continue' logs nothing)",
        session.namespace,
        len(names),
        count,
        ", ".join(named),
        f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else "",
    )


def _carry(session: Session, swap: Swap) -> None:
    rows = session.table(swap.schema.name)
    weight = swap.layer.weight.detach()
    step = max(1, CARRY_CHUNK_BYTES // (4 * weight.shape[1]))
    for begin in _with_progress(weight.shape[0], step, f"sending {swap.schema.name}", 4 * weight.numel()):
        part = weight[begin : begin + step].to("cpu", torch.float32).numpy()
        rows.assign(np.arange(begin, begin + len(part), dtype=np.uint64), part)


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
