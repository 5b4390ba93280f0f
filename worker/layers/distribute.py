"""``distribute``: swaps a model's large embeddings for distributed layers, whose rows live on the parameter servers."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import nn

from ...proto.errors import FailedPrecondition, InvalidArgument, not_allowed
from ...proto.schema import Table, TableSchema
from ..session.compiled_module import inside, plain_path, set_module
from ..session.row_optimizers import OptimizerLike
from ..session.session import JobSession
from .embedding import DistributedEmbedding, DistributedEmbeddingBag, DistributedLayer
from .layer_swap import (
    Layer,
    PlacedLayer,
    Swap,
    TableLayers,
    create_on_first_rank,
    distributed_layer_of,
    layers_by_table,
    plan_tables,
    refusal_of_lookup,
    refusal_of_weight,
)
from .lookup_hooks import install_lookup_hooks
from .stale_weights import SwappedWeight, swapped_weight, warn_of_stale_weights

Model = TypeVar("Model", bound=nn.Module)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def distribute(
    session: JobSession,
    model: Model,
    *,
    optimizer: OptimizerLike,
    min_rows: int = 10_000,
    tables: Mapping[str, Table] | None = None,
    exclude: Sequence[str] = (),
    carry_weights: bool = True,
    bind: Mapping[str, Sequence[str]] | None = None,
) -> Model:
    """Moves the rows of ``nn.Embedding`` and ``nn.EmbeddingBag`` layers to the parameter servers, in place.

    Rows of tables with placement "device" go to the devices of the job's ranks instead (docs/device-tables.md).
    A table is named after its layer's path in the model (``"tower.user_id"``), in the session's namespace; modules
    that ``torch.compile`` puts around others are no part of a path. Each layer becomes a distributed layer with the
    same ``forward``; smaller layers stay. Layers that share one weight, or that ``bind`` names together, read and train
    one table. The table of a frozen layer (``weight.requires_grad`` False) is read without a clock, and this job never
    pushes to it. Call it on every rank, before the dense
    optimizer is made and before ``DistributedDataParallel`` and ``torch.compile``. A warning names replaced weights
    that an optimizer or a list of weights still refers to. A gradient that reaches one of them is an error.

    Args:
        model: the model; it must not itself be an embedding.
        optimizer: the row optimizer of tables that have none of their own; the servers run it. One of this package,
            such as ``sr.optim.Adagrad(lr=0.05)`` (docs/optimizers.md lists them), or an optimizer of ``torch.optim``
            that has a counterpart: the class, a ``functools.partial`` of it, or an instance that has not stepped.
        min_rows: layers with fewer rows stay local and dense.
        tables: options by ``fnmatch`` pattern on the path; the first pattern that matches counts. None: no options.
        exclude: ``fnmatch`` patterns on the path of layers that stay local, whatever their size.
        carry_weights: whether rank 0 sends the layers' present weights to tables that are new. A table that exists
            keeps its rows. Nothing is sent for a layer made under :func:`deferred`, or with a ``Table.init`` of its
            own. False: rows begin as the table's ``init`` says, else as the layer's distribution does, which is
            normal(0, 1) unless a deferred layer was initialised otherwise; with L1 or group lasso it is zeros.
        bind: the paths of the layers that read one table, by the name of the table. They have equally many rows and
            columns, and the first one gives the rows that the table begins with. None: a table is named after its
            layer.

    Returns:
        The same model.

    Raises:
        InvalidArgument: there is nothing to distribute; or a pattern of ``tables`` or ``exclude``, or a path of
            ``bind``, is that of no layer of at least ``min_rows``; or layers of one table have different sizes; or an
            optimizer has no counterpart on the servers; or the model's device cannot hold the row cache; or a table
            with placement "device" does not fit on one, or the session's staleness is not 0.
        FailedPrecondition: the session is closed; or the model is distributed already; or a layer uses an option that
            cannot be distributed, in which case the text names the layer and the reason; or a table is in use in this
            process, or exists with another schema. The model is then unchanged.
    """
    session.core.native.check_usable()
    swapped = _swap(
        model, session, _plan(model, session, optimizer, min_rows, tables or {}, exclude, carry_weights, bind or {})
    )
    install_lookup_hooks(model, session)
    warn_of_stale_weights(swapped, stacklevel=2)
    return model


def layers_of_tables(
    model: nn.Module, min_rows: int, bind: Mapping[str, Sequence[str]] | None = None, exclude: Sequence[str] = ()
) -> list[TableLayers]:
    """Returns the layers that :func:`distribute` would distribute, by table; its arguments have the same meaning.

    Raises:
        InvalidArgument: as for :func:`distribute`.
    """
    return layers_by_table(_without(exclude, _layers(model, min_rows)), bind or {})


def _swap(model: nn.Module, session: JobSession, swaps: list[Swap]) -> list[SwappedWeight]:
    layers = _layers_on_devices(model, session, [swap for swap in swaps if swap.on_devices])
    there = [swap for swap in swaps if not swap.on_devices]
    try:
        made = create_on_first_rank(session, there)
    except BaseException:
        if session.core.device_tables is not None:
            session.core.device_tables.remove(list(layers))
        raise
    for schema, layer in layers.values():
        session.core.bind_on_devices(schema, layer.anchor)
    for swap, schema in zip(there, made, strict=True):
        first = distributed_layer_of(swap.layer, schema, session.core.origins)
        session.core.bind(schema, num_rows=swap.layer.num_embeddings, anchor=first.anchor, frozen=swap.is_frozen)
        layers[schema.name] = schema, first
    swapped = []
    for swap in swaps:
        schema, layer = layers[swap.schema.name]
        for placed in swap.layers:
            if placed is not swap.layers[0]:
                layer = distributed_layer_of(placed.layer, schema, session.core.origins)
            for path in placed.paths:
                set_module(model, path, layer)
            if not swap.is_frozen:
                swapped.append(swapped_weight(placed.paths[0], placed.layer))
    return swapped


def _layers_on_devices(
    model: nn.Module, session: JobSession, swaps: list[Swap]
) -> dict[str, tuple[TableSchema, DistributedLayer]]:
    """Makes the tables on devices, and returns their schemas and layers by the name of the table."""
    if not swaps:
        return {}
    from .device_layers import layers_on_devices  # slow to import

    return layers_on_devices(model, session, swaps)


def _plan(
    model: nn.Module,
    session: JobSession,
    optimizer: OptimizerLike,
    min_rows: int,
    tables: Mapping[str, Table],
    exclude: Sequence[str],
    carry_weights: bool,
    bind: Mapping[str, Sequence[str]],
) -> list[Swap]:
    """Plans the layers to swap; raises before anything is changed."""
    if isinstance(inside(model), nn.parallel.DistributedDataParallel):
        raise FailedPrecondition("distribute: call it before DistributedDataParallel wraps the model")
    layers = _without(exclude, _layers(model, min_rows))
    if not layers:
        distributed = (DistributedEmbedding, DistributedEmbeddingBag)
        done = [plain_path(path) for path, module in model.named_modules() if isinstance(module, distributed)]
        if done:
            raise FailedPrecondition(f"distribute: the layers {', '.join(done)} are distributed already")
        rows = [
            module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        ]
        largest = f"; its largest has {max(rows)}" if rows else ""
        raise InvalidArgument(
            f"distribute: the model has no nn.Embedding or nn.EmbeddingBag of min_rows={min_rows} rows{largest}"
        )
    owners = _weight_owners(model)
    for placed in layers:
        _refuse_unsupported(placed.paths[0], placed.layer, owners)
    return plan_tables(
        layers_by_table(layers, bind),
        session,
        what="distribute",
        optimizer=optimizer,
        tables=tables,
        carry_weights=carry_weights,
    )


def _layers(model: nn.Module, min_rows: int) -> list[PlacedLayer]:
    found: dict[int, tuple[Layer, list[str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or module.num_embeddings < min_rows:
            continue
        path = plain_path(path)
        if not path:
            raise InvalidArgument("distribute: the model is itself an embedding; wrap it in a module that names it")
        paths = found.setdefault(id(module), (module, []))[1]
        if path not in paths:
            paths.append(path)
    return [PlacedLayer(layer, tuple(paths)) for layer, paths in found.values()]


def _without(exclude: Sequence[str], layers: list[PlacedLayer]) -> list[PlacedLayer]:
    """Returns the layers whose paths match no pattern."""
    if isinstance(exclude, str):
        raise not_allowed("distribute.exclude", exclude, f"a sequence of patterns, such as [{exclude!r}]")
    for pattern in exclude:
        if not any(fnmatch.fnmatchcase(path, pattern) for placed in layers for path in placed.paths):
            names = ", ".join(placed.paths[0] for placed in layers) or "none"
            raise InvalidArgument(f"distribute: exclude {pattern!r} matches no layer; layers to distribute: {names}")
    return [
        placed
        for placed in layers
        if not any(fnmatch.fnmatchcase(path, pattern) for pattern in exclude for path in placed.paths)
    ]


def _weight_owners(model: nn.Module) -> dict[int, set[tuple[int, str]]]:
    """Returns the owners of each parameter that are no embeddings, or have it under another name than weight.

    The result is (id of the module, attribute) by the id of the parameter.
    """
    owners: dict[int, set[tuple[int, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not (name == "weight" and isinstance(module, nn.Embedding | nn.EmbeddingBag)):
                owners.setdefault(id(parameter), set()).add((id(module), name))
    return owners


def _refuse_unsupported(path: str, layer: Layer, owners: dict[int, set[tuple[int, str]]]) -> None:
    of_lookup, of_weight = refusal_of_lookup(layer.max_norm, layer.scale_grad_by_freq), refusal_of_weight(layer.weight)
    reasons: list[tuple[bool, str]] = [
        (of_lookup is not None, str(of_lookup)),
        (layer._parameters.get("weight") is None, "its weight is parametrised"),
        (id(layer._parameters.get("weight")) in owners, "its weight is tied to a parameter of no embedding"),
        (of_weight is not None, f"its weight is {of_weight}"),
        (any(getattr(layer, hooks) for hooks in _HOOKS), "it has hooks, which the distributed layer would not have"),
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
