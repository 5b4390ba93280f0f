"""``distribute``: swaps a model's large embeddings for twins whose rows live on the parameter servers."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from rich.progress import Progress
from torch import nn

from ..proto.errors import FailedPrecondition, InvalidArgument, SparserowError
from ..proto.schema import Normal, RowOptimizer, Table, TableSchema
from .deferred import deferred_init
from .embedding import BAG_MODES, DistributedEmbedding, DistributedEmbeddingBag
from .merged_pull import MergedPull
from .session import Session

_log = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)
Layer = nn.Embedding | nn.EmbeddingBag

_CARRY_CHUNK_BYTES = 16 << 20
_PROGRESS_FROM_BYTES = 256 << 20
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class _Swap:
    """One layer to swap: where it stands and what its table will be."""

    paths: tuple[str, ...]  # every place of the module; the first names the table
    layer: Layer
    schema: TableSchema
    is_carried: bool


def distribute(
    model: Model,
    session: Session,
    *,
    optimizer: RowOptimizer,
    min_rows: int = 10_000,
    tables: Mapping[str, Table] | None = None,
    carry_weights: bool = True,
) -> Model:
    """Moves the rows of ``nn.Embedding`` and ``nn.EmbeddingBag`` layers to the parameter servers, in place.

    A table is named after its layer's path in the model (``"tower.user_id"``), in the session's namespace. Each layer
    becomes a twin with the same ``forward``; smaller layers stay. Call it on every rank, before the dense optimizer is
    made and before ``DistributedDataParallel`` and ``torch.compile``.

    Args:
        model: not itself an embedding.
        session: from :func:`connect`.
        optimizer: of all tables that name no other; runs on the servers.
        min_rows: layers with fewer rows stay local and dense.
        tables: options by ``fnmatch`` pattern on the path; the first pattern that matches counts.
        carry_weights: rank 0 sends the layers' present weights to tables that are new. A table that exists keeps its
            rows; a layer made under :func:`deferred`, or with a ``Table.init`` of its own, has none to send. False:
            rows begin as the table's ``init``, else as the layer's (normal(0, 1) unless deferred and initialised).

    Returns:
        The same model.

    Raises:
        InvalidArgument: nothing to distribute, or a pattern that matches no layer of at least ``min_rows``.
        FailedPrecondition: a layer uses what cannot be honoured (names the layer and the reason), or a table is in
            use in this process, or exists with another schema. The model is then unchanged.
    """
    swaps = _plan(model, session, optimizer, min_rows, tables or {}, carry_weights)
    made = _create_on_first_rank(session, swaps)
    for swap, schema in zip(swaps, made, strict=True):
        twin = _twin_of(swap.layer, schema)
        session.bind(schema, num_rows=swap.layer.num_embeddings, anchor=twin.anchor)
        for path in swap.paths:
            model.set_submodule(path, twin)
    MergedPull(session.native).install(model)
    return model


def _plan(
    model: nn.Module,
    session: Session,
    optimizer: RowOptimizer,
    min_rows: int,
    tables: Mapping[str, Table],
    carry_weights: bool,
) -> list[_Swap]:
    """What to swap; raises before anything is changed."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise FailedPrecondition("distribute: call it before DistributedDataParallel wraps the model")
    layers = _layers(model, min_rows)
    if not layers:
        raise InvalidArgument(
            f"distribute: the model has no nn.Embedding or nn.EmbeddingBag of min_rows={min_rows} rows"
        )
    patterns = dict.fromkeys(tables, False)
    owners = _weight_owners(model)
    bound = set(session.bound_tables())
    swaps = []
    for layer, paths in layers:
        _refuse_unsupported(paths[0], layer, owners)
        if paths[0] in bound:
            raise FailedPrecondition(f"table {paths[0]!r} is in use by this session already; use another namespace")
        matching = [pattern for pattern in tables if fnmatch.fnmatchcase(paths[0], pattern)]
        patterns.update(dict.fromkeys(matching, True))
        table = tables[matching[0]] if matching else Table()
        schema = TableSchema(
            namespace=session.namespace,
            name=paths[0],
            dim=layer.embedding_dim,
            optimizer=table.optimizer or optimizer,
            dtype=table.dtype or "float32",
            init=table.init or deferred_init(layer) or Normal(0.0, 1.0),
            seed=table.seed or 0,
        )
        is_carried = carry_weights and table.init is None and not layer.weight.is_meta
        swaps.append(_Swap(tuple(paths), layer, schema, is_carried))
    for pattern, is_matched in patterns.items():
        if not is_matched:
            names = ", ".join(paths[0] for _, paths in layers)
            raise InvalidArgument(f"distribute: tables[{pattern!r}] matches no layer; layers to distribute: {names}")
    return swaps


def _layers(model: nn.Module, min_rows: int) -> list[tuple[Layer, list[str]]]:
    found: dict[int, tuple[Layer, list[str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or module.num_embeddings < min_rows:
            continue
        if not path:
            raise InvalidArgument("distribute: the model is itself an embedding; wrap it in a module that names it")
        found.setdefault(id(module), (module, []))[1].append(path)
    return list(found.values())


def _weight_owners(model: nn.Module) -> dict[int, set[tuple[int, str]]]:
    """Which (module, attribute) hold each parameter; a weight with more than one is tied."""
    owners: dict[int, set[tuple[int, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), set()).add((id(module), name))
    return owners


def _refuse_unsupported(path: str, layer: Layer, owners: dict[int, set[tuple[int, str]]]) -> None:
    reasons: list[tuple[bool, str]] = [
        (layer.max_norm is not None, "max_norm renormalises rows in place at each lookup"),
        (layer.scale_grad_by_freq, "scale_grad_by_freq needs counts over the whole batch of all workers"),
        (len(owners.get(id(layer._parameters.get("weight")), ())) != 1, "its weight is tied or parametrised"),
        (not layer.weight.requires_grad, "its weight is frozen (requires_grad=False): keep it local"),
        (layer.weight.dtype not in _DTYPES, f"its weight is {layer.weight.dtype}"),
        (any(getattr(layer, hooks) for hooks in _HOOKS), "it has hooks, which the twin would not have"),
        (
            type(layer).forward not in (nn.Embedding.forward, nn.EmbeddingBag.forward),
            f"{type(layer).__name__} has a forward of its own",
        ),
    ]
    for is_refused, reason in reasons:
        if is_refused:
            raise FailedPrecondition(
                f"distribute: layer {path!r} cannot be distributed: {reason}; raise min_rows to leave it local"
            )


def _twin_of(layer: Layer, schema: TableSchema) -> DistributedEmbedding | DistributedEmbeddingBag:
    twin: DistributedEmbedding | DistributedEmbeddingBag
    if isinstance(layer, nn.EmbeddingBag):
        assert layer.mode in BAG_MODES
        twin = DistributedEmbeddingBag(
            schema.full_name,
            num_embeddings=layer.num_embeddings,
            embedding_dim=layer.embedding_dim,
            padding_idx=layer.padding_idx,
            dtype=layer.weight.dtype,
            mode=layer.mode,
            include_last_offset=bool(layer.include_last_offset),
        )
    else:
        twin = DistributedEmbedding(
            schema.full_name,
            num_embeddings=layer.num_embeddings,
            embedding_dim=layer.embedding_dim,
            padding_idx=layer.padding_idx,
            dtype=layer.weight.dtype,
        )
    return twin.train(layer.training)


def _create_on_first_rank(session: Session, swaps: list[_Swap]) -> list[TableSchema]:
    """Creates the tables, rank 0 first with their first rows, so that no other rank reads before they are there."""
    is_group = session.world_size > 1 and dist.is_available() and dist.is_initialized()
    failure: SparserowError | None = None
    made: list[TableSchema] = []
    if session.rank == 0 or not is_group:
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
    return made or [session.catalog.create_table(swap.schema) for swap in swaps]


def _create(session: Session, swaps: list[_Swap], *, has_rows: bool) -> list[TableSchema]:
    existing = {schema.name for schema in session.catalog.list_tables(session.namespace)}
    made = [session.catalog.create_table(swap.schema) for swap in swaps]
    for swap, schema in zip(swaps, made, strict=True):
        if not has_rows:
            continue
        if schema.name in existing:
            _log.info("table %s exists: its rows are kept, the layer's weights are not sent", schema.full_name)
        elif swap.is_carried:
            _carry(session, swap)
        elif isinstance(swap.layer, nn.Embedding) and swap.layer.padding_idx is not None:
            padding = np.array([swap.layer.padding_idx], dtype=np.uint64)
            session.table(schema.name).assign(padding, np.zeros((1, schema.dim), dtype=np.float32))
    return made


def _carry(session: Session, swap: _Swap) -> None:
    rows = session.table(swap.schema.name)
    weight = swap.layer.weight.detach()
    step = max(1, _CARRY_CHUNK_BYTES // (4 * weight.shape[1]))
    for begin in _with_progress(weight.shape[0], step, f"sending {swap.schema.name}", 4 * weight.numel()):
        part = weight[begin : begin + step].to("cpu", torch.float32).numpy()
        rows.assign(np.arange(begin, begin + len(part), dtype=np.uint64), part)


def _with_progress(total: int, step: int, title: str, total_bytes: int) -> Iterator[int]:
    """range(0, total, step), with a progress bar when it is long work."""
    if total_bytes < _PROGRESS_FROM_BYTES:
        yield from range(0, total, step)
        return
    with Progress(transient=True) as progress:
        task = progress.add_task(title, total=total)
        for begin in range(0, total, step):
            yield begin
            progress.update(task, completed=min(total, begin + step))
