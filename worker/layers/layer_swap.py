"""Prepares the swap of embeddings for distributed layers: the tables' schemas, their first rows, and the layers."""

from __future__ import annotations

import difflib
import fnmatch
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ...proto.errors import FailedPrecondition, InvalidArgument, SparserowError, not_allowed
from ...proto.optim import starts_at_zero
from ...proto.process.lone_work import lone_work
from ...proto.schema import Constant, Normal, RowPolicy, Table, TableSchema
from ..session.lower_rank import from_lower_rank
from ..session.rank_beats import give_signs, meet
from ..session.row_optimizers import OptimizerLike, row_optimizer_of
from ..session.session import JobSession
from ..session.tensor_group import on_leader
from .deferred import tied_init
from .embedding import BAG_MODES, DistributedEmbedding, DistributedEmbeddingBag
from .weight_carry import carry, drop_unfinished, is_unfinished, mark_unfinished

_log = logging.getLogger(__name__)
Layer = nn.Embedding | nn.EmbeddingBag
_WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_MOST_NAMED = 5
_WHAT = "tables and their first rows"


@dataclass(frozen=True)
class PlacedLayer:
    """A layer with its places in the model.

    Attributes:
        layer: the layer.
        paths: every path of the layer in the model.
    """

    layer: Layer
    paths: tuple[str, ...]


@dataclass(frozen=True)
class TableLayers:
    """The layers that read one table.

    Attributes:
        name: the name of the table.
        layers: the layers, at least one; they have equally many rows and columns.
    """

    name: str
    layers: tuple[PlacedLayer, ...]


@dataclass(frozen=True)
class Swap:
    """The layers of one table to swap, and its schema.

    Attributes:
        layers: the layers, at least one. The first rows of the table are those of the first one.
        schema: the schema of the table, without an id.
        is_carried: whether the weights are sent to the table when the table is new.
        on_devices: whether the rows are to be on the devices of the ranks.
    """

    layers: tuple[PlacedLayer, ...]
    schema: TableSchema
    is_carried: bool
    on_devices: bool = False

    @property
    def layer(self) -> Layer:
        """The first of the layers."""
        return self.layers[0].layer

    @property
    def is_frozen(self) -> bool:
        """Whether the rows are not trained by this job."""
        return not self.layer.weight.requires_grad


def layers_by_table(layers: Sequence[PlacedLayer], bind: Mapping[str, Sequence[str]]) -> list[TableLayers]:
    """Returns the layers of each table, in the order of their first layers in the model.

    Args:
        layers: the layers to distribute. Those that share one weight share a table, which is named after the first.
        bind: the paths of the layers of one table, by the name of the table.

    Raises:
        InvalidArgument: a path is that of no such layer or is bound twice, layers of one table differ in their sizes
            or in whether they are frozen, or a table would have the name of another one.
    """
    by_path = {path: placed for placed in layers for path in placed.paths}
    names: dict[int, str] = {}  # of the table, by the id of the weight
    for name, paths in bind.items():
        if isinstance(paths, str) or not paths:
            raise not_allowed(f"distribute.bind[{name!r}]", paths, "a sequence of the paths of layers")
        for path in paths:
            if path not in by_path:
                near = difflib.get_close_matches(path, by_path, n=3)
                listed = f"nearest: {', '.join(near)}" if near else f"layers to distribute: {', '.join(by_path)}"
                raise InvalidArgument(
                    f"distribute.bind[{name!r}]: the model has no layer {path!r} to distribute; {listed}"
                )
            weight = id(by_path[path].layer.weight)
            if names.setdefault(weight, name) != name:
                raise InvalidArgument(f"distribute.bind: layer {path!r} is bound to {names[weight]!r} and to {name!r}")
    groups: dict[str, list[PlacedLayer]] = {}
    for placed in layers:
        weight = id(placed.layer.weight)
        if weight not in names and placed.paths[0] in bind:
            raise InvalidArgument(
                f"distribute.bind: layer {placed.paths[0]!r} is not among the layers of the table of its name"
            )
        groups.setdefault(names.setdefault(weight, placed.paths[0]), []).append(placed)
    made = []
    for name, group in groups.items():
        order = {path: number for number, path in enumerate(bind.get(name, ()))}
        group.sort(key=lambda placed: min(order.get(path, len(order)) for path in placed.paths))
        _check_alike(name, group)
        made.append(TableLayers(name, tuple(group)))
    return made


def _check_alike(name: str, group: Sequence[PlacedLayer]) -> None:
    """Checks that the layers of one table have equally many rows and columns, and are all frozen or none."""
    first = group[0]
    for other in group[1:]:
        for what, mine, its in (
            ("rows", first.layer.num_embeddings, other.layer.num_embeddings),
            ("columns", first.layer.embedding_dim, other.layer.embedding_dim),
            ("requires_grad", first.layer.weight.requires_grad, other.layer.weight.requires_grad),
        ):
            if mine != its:
                raise InvalidArgument(
                    f"distribute: the layers {first.paths[0]!r} and {other.paths[0]!r} of table {name!r} differ in "
                    f"{what}: {mine} and {its}"
                )


def plan_tables(
    layers: Sequence[TableLayers],
    session: JobSession,
    *,
    what: str,
    optimizer: OptimizerLike,
    tables: Mapping[str, Table],
    carry_weights: bool,
) -> list[Swap]:
    """Plans the tables of layers.

    Args:
        layers: the layers of each table.
        session: the session that will bind the tables.
        what: the name of the calling function, for error texts.
        optimizer: the row optimizer of tables that have none of their own.
        tables: options by ``fnmatch`` pattern on the table's name; the first matching pattern counts.
        carry_weights: whether weights are sent to tables that are new.

    Raises:
        InvalidArgument: a pattern of ``tables`` matches no table, or an optimizer has no counterpart on the servers.
        FailedPrecondition: the session has bound a table of that name already, or a policy of admission and eviction
            is given for a frozen table.
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
    for group in layers:
        name, layer = group.name, group.layers[0].layer
        if name in bound:
            raise FailedPrecondition(f"table {name!r} is already in use by this session; use another namespace")
        matching = [pattern for pattern in tables if fnmatch.fnmatchcase(name, pattern)]
        is_used.update(dict.fromkeys(matching, True))
        table = tables[matching[0]] if matching else Table()
        chosen = own.get(matching[0], default) if matching else default
        schema = TableSchema(
            namespace=session.namespace,
            name=name,
            dim=layer.embedding_dim,
            optimizer=chosen,
            dtype=table.dtype or "float32",
            init=table.init
            or tied_init([each.layer for each in group.layers])
            or (Constant() if starts_at_zero(chosen) else Normal(0.0, 1.0)),
            seed=table.seed or 0,
            policy=table.policy,
        )
        is_carried = carry_weights and table.init is None and not layer.weight.is_meta
        swaps.append(Swap(group.layers, schema, is_carried, table.placement == "device"))
        if swaps[-1].is_frozen and table.policy != RowPolicy():
            raise FailedPrecondition(
                f"{what}: table {name!r} is frozen, so no row is admitted or removed; allowed: no option of admission, "
                "eviction or memory"
            )
    for pattern, is_matched in is_used.items():
        if not is_matched:
            names = ", ".join(group.name for group in layers)
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
    distributed.requires_grad_(layer.weight.requires_grad)
    if not layer.weight.is_meta:
        distributed.to(layer.weight.device)
    return distributed.train(layer.training)


def create_on_first_rank(session: JobSession, swaps: list[Swap]) -> list[TableSchema]:
    """Creates the tables on every rank and returns their schemas, with ids. Followers of a tensor group get them.

    Rank 0 goes first and writes the first rows, so that no other rank reads a table before its rows are there. Ranks
    without a process group look for the tables until they are there and whole, or no lower rank is about to make them.
    """
    group = session.core.tensor_group
    is_group = session.core.is_distributed and dist.is_available() and dist.is_initialized()
    failure: SparserowError | None = None
    give_signs()
    made: list[TableSchema] = []
    if (session.rank == 0 or not is_group) and (group is None or group.leads):
        try:
            if not is_group:
                from_lower_rank(session.core, lambda: _are_whole(session, swaps) or None, _WHAT)
            with lone_work.doing(_WHAT):
                made = _create(session, swaps, has_rows=session.rank == 0)
        except SparserowError as error:
            failure = error
    if is_group:
        outcome: list[str | None] = [None if failure is None else str(failure)]
        meet(f"distribute: {_WHAT}")
        dist.broadcast_object_list(outcome, src=0)
        if failure is None and outcome[0] is not None:
            failure = FailedPrecondition(f"distribute failed on rank 0: {outcome[0]}")
    if failure is not None:
        raise failure
    return on_leader(group, lambda: made or _tables_of(session, swaps))


def _are_whole(session: JobSession, swaps: list[Swap]) -> bool:
    """Returns whether the tables exist, and none of them is being given its first rows."""
    there = _by_name(session)
    if any(swap.schema.name not in there for swap in swaps):
        return False
    return not any(is_unfinished(session, there[swap.schema.name]) for swap in swaps if swap.is_carried)


def _tables_of(session: JobSession, swaps: list[Swap]) -> list[TableSchema]:
    """Creates the tables, or finds them."""
    there = _by_name(session)
    return [_table_of(session, swap, there.get(swap.schema.name)) for swap in swaps]


def _table_of(session: JobSession, swap: Swap, there: TableSchema | None) -> TableSchema:
    """Creates a table, or finds it; a frozen one may be there with the optimizer of the job that trains it."""
    found = there if swap.is_frozen else None
    if found is not None and found.dim != swap.schema.dim:
        raise FailedPrecondition(
            f"table {found.full_name!r} exists with dim {found.dim}; the frozen layer {swap.layers[0].paths[0]!r} "
            f"has {swap.schema.dim}"
        )
    return found or session.core.catalog.create_table(swap.schema)


def _by_name(session: JobSession) -> dict[str, TableSchema]:
    return {schema.name: schema for schema in session.core.catalog.list_tables(session.namespace)}


def _create(session: JobSession, swaps: list[Swap], *, has_rows: bool) -> list[TableSchema]:
    """Creates the tables, and writes the first rows of those that are new.

    When it fails, the new tables are dropped: one with a part of its rows would count as there before at the next try,
    which then sends nothing.
    """
    if not has_rows:
        return _tables_of(session, swaps)
    existing = _by_name(session)
    for swap in swaps:
        found = existing.get(swap.schema.name)
        if swap.is_carried and found is not None and drop_unfinished(session, found):
            del existing[found.name]
    new = [swap for swap in swaps if swap.schema.name not in existing]
    made = []
    try:
        for swap in swaps:
            made.append(_table_of(session, swap, existing.get(swap.schema.name)))
            if swap.is_carried and swap.schema.name not in existing:
                mark_unfinished(session, made[-1])  # at once, as other workers look for the tables
        _log_found(session, [schema.name for schema in made if schema.name in existing], len(made))
        for swap in new:
            if swap.is_carried:
                carry(session, swap.schema.name, swap.layer.weight.detach())
            else:
                _assign_padding(session, swap)
    except BaseException:
        for swap in new:
            with suppress(SparserowError):  # that of the failure is raised
                session.core.catalog.drop_table(session.namespace, swap.schema.name)
        raise
    return made


def _assign_padding(session: JobSession, swap: Swap) -> None:
    """Writes zeros to the rows that torch fills with zeros."""
    layers = [each.layer for each in swap.layers]
    found = {each.padding_idx for each in layers if isinstance(each, nn.Embedding) and each.padding_idx is not None}
    if found:
        padding = np.array(sorted(found), dtype=np.uint64)
        session.core.table(swap.schema.name).assign(padding, np.zeros((len(found), swap.schema.dim), dtype=np.float32))


def _log_found(session: JobSession, names: list[str], count: int) -> None:
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
