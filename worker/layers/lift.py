"""``lift_embeddings``: turns the large weights of a captured graph into tables, and their lookups into lookups there.

It serves models that were not written for Sparserow: an exported program, or a graph captured by ``torch.fx``,
``make_fx`` or a compiler. TensorFlow gather swaps such as Meituan's MtGatherV2 have the same idea: a lookup is found by
its operator, not by its layer. So code that calls ``F.embedding`` on a bare parameter is found as well.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.nn import functional

from ...proto.errors import FailedPrecondition, InvalidArgument, not_allowed
from ...proto.schema import Table
from ..session.row_optimizers import OptimizerLike
from ..session.session import JobSession
from .embedding import BAG_MODES
from .graph_check import largest_gap
from .layer_swap import (
    Layer,
    PlacedLayer,
    TableLayers,
    create_on_first_rank,
    distributed_layer_of,
    plan_tables,
    refusal_of_lookup,
    refusal_of_weight,
)
from .lookup_hooks import install_lookup_hooks

_aten = torch.ops.aten
_MODE_NAMES = {number: name for name, number in BAG_MODES.items()}


@dataclass(frozen=True)
class _Lookup:
    """One lookup of a graph with the options of torch's layers, whatever operator it was."""

    node: fx.Node  # its value is the rows, or a tuple that begins with the pooled rows
    weight: str  # the path of the parameter or buffer
    inputs: tuple[fx.Node | None, ...]  # the ids; for a bag also offsets and per_sample_weights
    mode: str | None = None  # the mode of a bag; None: not a bag
    padding_idx: int | None = None
    include_last_offset: bool = False
    is_tuple: bool = False
    refusal: str | None = None  # why the lookup cannot be distributed; None: it can


def lift_embeddings(
    session: JobSession,
    program: ExportedProgram | fx.GraphModule,
    *,
    optimizer: OptimizerLike,
    min_rows: int = 10_000,
    tables: Mapping[str, Table] | None = None,
    carry_weights: bool = True,
    check: Sequence[Any] | None = None,
) -> fx.GraphModule:
    """Moves the rows of large weights that a graph reads by ids to the parameter servers.

    Each weight of at least ``min_rows`` rows that only lookups read becomes a table. The table has the weight's name
    without a closing ".weight", and several lookups of one weight share it. Lookups are ``aten.embedding`` and
    ``aten.embedding_bag``, also in decomposed form, their ``torch.nn.functional`` forms, and layers that the tracer
    left whole. From the second batch on, lookups that depend only on the inputs share one pull, one frame per shard.

    Args:
        program: the program to lift, which is not changed. A graph module shares its other parameters with the result.
        optimizer: the row optimizer of the tables, in any form that :func:`distribute` takes.
        min_rows: weights with fewer rows stay local.
        tables: options by ``fnmatch`` pattern on the table's name; see :func:`distribute`. None: no options.
        carry_weights: whether rank 0 sends the present weights to tables that are new; see :func:`distribute`.
        check: inputs on which the result must equal the program, both in eval mode, to 1e-6 of the largest value.
            None: no check.

    Returns:
        A module to train or to export again. In train mode its lookups belong to the session's step. Other behaviour
        that the capture has fixed, such as dropout, stays fixed.

    Raises:
        InvalidArgument: there is no such weight, a pattern of ``tables`` matches no weight, or the program's device
            cannot hold the row cache.
        FailedPrecondition: a weight has another reader than lookups, or a lookup that cannot be distributed; the text
            names the weight and the reason. Or a table is in use in this process, or exists with another schema. Or
            ``check`` failed.
    """
    source = program.module() if isinstance(program, ExportedProgram) else program
    if not isinstance(source, fx.GraphModule):
        raise not_allowed("lift_embeddings.program: type", type(program).__name__, "ExportedProgram, fx.GraphModule")
    lifted = fx.GraphModule(source, copy.deepcopy(source.graph))
    by_weight = _lookups_by_weight(lifted, min_rows)
    if not by_weight:
        raise InvalidArgument(f"lift_embeddings: no lookup reads a weight of min_rows={min_rows} rows")
    for weight, lookups in by_weight.items():
        _refuse_unsupported(lifted, weight, lookups)
    layers = [
        TableLayers(name, (PlacedLayer(_layer_of(lifted, lookups[0]), (name,)),))
        for name, lookups in ((_table_name(weight), lookups) for weight, lookups in by_weight.items())
    ]
    swaps = plan_tables(
        layers,
        session,
        what="lift_embeddings",
        optimizer=optimizer,
        tables=tables or {},
        carry_weights=carry_weights,
    )
    for swap in swaps:
        if swap.on_devices:
            raise InvalidArgument(
                f"lift_embeddings: tables[{swap.schema.name!r}].placement: 'device' is not allowed, as a graph has no "
                "layer that calls all ranks; allowed: servers, or distribute of a model with layers"
            )
    made = create_on_first_rank(session, swaps)
    for lookups, swap, schema in zip(by_weight.values(), swaps, made, strict=True):
        distributed = [
            distributed_layer_of(_layer_of(lifted, lookup), schema, session.core.origins) for lookup in lookups
        ]
        session.core.bind(schema, num_rows=swap.layer.num_embeddings, anchor=distributed[0].anchor)
        for number, (lookup, layer) in enumerate(zip(lookups, distributed, strict=True)):
            layer.anchor = distributed[0].anchor
            _replace(lifted, lookup, f"lookup_{schema.name.replace('.', '_')}_{number}", layer)
    # The capture's checks of its inputs are modules without users; they must stay.
    lifted.graph.eliminate_dead_code(lambda node: node.op == "call_module" or node.is_impure())
    lifted.delete_all_unused_submodules()
    for weight in by_weight:
        _forget(lifted, weight)
    lifted.graph.lint()
    lifted.recompile()
    install_lookup_hooks(lifted, session)
    if check is not None:
        _check(source, lifted, tuple(check))
    return lifted


def _lookups_by_weight(graph_module: fx.GraphModule, min_rows: int) -> dict[str, list[_Lookup]]:
    """Returns the lookups of each large weight, in the order of the graph."""
    weights = dict(graph_module.named_parameters(remove_duplicate=False))
    found: dict[str, list[_Lookup]] = {}
    for node in graph_module.graph.nodes:
        lookup = _lookup_of(graph_module, node)
        if lookup is not None and lookup.weight in weights and len(weights[lookup.weight]) >= min_rows:
            found.setdefault(lookup.weight, []).append(lookup)
    return found


def _lookup_of(graph_module: fx.GraphModule, node: fx.Node) -> _Lookup | None:
    """Returns the lookup that a node performs; None for any other node, and for a lookup in a computed weight."""
    if node.op == "call_module":
        layer = graph_module.get_submodule(str(node.target))
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and type(layer) in (nn.Embedding, nn.EmbeddingBag):
            return _layer(node, layer)
        return None
    read = _OPERATORS.get(node.target) if node.op == "call_function" else None
    if read is None:
        return None
    names, parse = read
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    weight = arguments.get("weight")
    if not isinstance(weight, fx.Node) or weight.op != "get_attr":
        return None
    return parse(node, str(weight.target), arguments)


def _layer(node: fx.Node, layer: Layer) -> _Lookup:
    names = ["input"] if isinstance(layer, nn.Embedding) else ["input", "offsets", "per_sample_weights"]
    arguments: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return _Lookup(
        node,
        f"{node.target}.weight",
        tuple(arguments.get(name) for name in names),
        mode=layer.mode if isinstance(layer, nn.EmbeddingBag) else None,
        padding_idx=layer.padding_idx,
        include_last_offset=isinstance(layer, nn.EmbeddingBag) and bool(layer.include_last_offset),
        refusal=refusal_of_lookup(layer.max_norm, layer.scale_grad_by_freq),
    )


def _embedding(node: fx.Node, weight: str, arguments: dict[str, Any]) -> _Lookup:
    padding = arguments.get("padding_idx")
    return _Lookup(
        node,
        weight,
        (arguments["ids"],),
        padding_idx=None if padding in (None, -1) else padding,
        refusal=refusal_of_lookup(arguments.get("max_norm"), bool(arguments.get("scale_grad_by_freq"))),
    )


def _bag(node: fx.Node, weight: str, arguments: dict[str, Any]) -> _Lookup:
    is_tuple = node.target is not functional.embedding_bag
    mode = arguments.get("mode", _MODE_NAMES[0] if is_tuple else "mean")
    padding = arguments.get("padding_idx")
    return _Lookup(
        node,
        weight,
        (arguments["ids"], arguments.get("offsets"), arguments.get("per_sample_weights")),
        mode=mode if isinstance(mode, str) else _MODE_NAMES[mode],
        padding_idx=None if padding in (None, -1) else padding,
        include_last_offset=bool(arguments.get("include_last_offset", False)),
        is_tuple=is_tuple,
        refusal=refusal_of_lookup(arguments.get("max_norm"), bool(arguments.get("scale_grad_by_freq")))
        or ("its counts or indexes of bags are used" if is_tuple and not _only_pooled_is_used(node) else None),
    )


def _only_pooled_is_used(node: fx.Node) -> bool:
    return all(user.target is operator.getitem and (user.args[1] == 0 or not user.users) for user in node.users)


_EMBEDDING_NAMES = ("weight", "ids", "padding_idx", "scale_grad_by_freq", "sparse")
_BAG_NAMES = (
    "weight", "ids", "offsets", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights", "include_last_offset",
    "padding_idx",
)  # fmt: skip
# The order of each operator's arguments (torch/nn/functional.py and native_functions.yaml of torch).
_OPERATORS: dict[Any, tuple[tuple[str, ...], Callable[[fx.Node, str, dict[str, Any]], _Lookup]]] = {
    _aten.embedding.default: (_EMBEDDING_NAMES, _embedding),
    functional.embedding: (
        ("ids", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
        _embedding,
    ),
    _aten.embedding_bag.default: (_BAG_NAMES, _bag),
    _aten.embedding_bag.padding_idx: (_BAG_NAMES, _bag),
    _aten._embedding_bag.default: (_BAG_NAMES, _bag),
    _aten._embedding_bag_forward_only.default: (_BAG_NAMES, _bag),
    functional.embedding_bag: (
        (
            "ids", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse",
            "per_sample_weights", "include_last_offset", "padding_idx",
        ),
        _bag,
    ),
}  # fmt: skip


def _refuse_unsupported(graph_module: fx.GraphModule, weight: str, lookups: list[_Lookup]) -> None:
    parameter = graph_module.get_parameter(weight)
    served = {lookup.node for lookup in lookups}
    readers = {
        user
        for node in graph_module.graph.nodes
        if node.op == "get_attr" and node.target == weight
        for user in node.users
    }
    holders = [path for path, other in graph_module.named_parameters(remove_duplicate=False) if other is parameter]
    of_weight = refusal_of_weight(parameter)
    reasons: list[tuple[bool, str]] = [
        (bool(readers - served), f"{next(iter(readers - served), None)} reads it otherwise than by ids"),
        (len(holders) > 1, f"it is tied: {', '.join(holders)}"),
        (of_weight is not None, f"it is {of_weight}"),
        (not parameter.requires_grad, "it is frozen (requires_grad=False)"),
        *((lookup.refusal is not None, str(lookup.refusal)) for lookup in lookups),
    ]
    for is_refused, reason in reasons:
        if is_refused:
            raise FailedPrecondition(
                f"lift_embeddings: weight {weight!r} cannot be lifted: {reason}; raise min_rows to leave it local"
            )


def _table_name(weight: str) -> str:
    return weight.removesuffix(".weight")


def _layer_of(graph_module: fx.GraphModule, lookup: _Lookup) -> Layer:
    """Returns a layer that computes the lookup and shares its weight."""
    weight, padding = graph_module.get_parameter(lookup.weight), lookup.padding_idx
    layer: Layer
    if lookup.mode is None:
        layer = nn.Embedding.from_pretrained(weight, freeze=False, padding_idx=padding)
    else:
        last = lookup.include_last_offset
        layer = nn.EmbeddingBag.from_pretrained(
            weight, freeze=False, mode=lookup.mode, padding_idx=padding, include_last_offset=last
        )
    return layer


def _replace(graph_module: fx.GraphModule, lookup: _Lookup, name: str, layer: nn.Module) -> None:
    graph_module.add_submodule(name, layer)
    inputs = lookup.inputs if lookup.mode is None else _whole_bags(lookup.inputs)
    with graph_module.graph.inserting_before(lookup.node):
        served = graph_module.graph.call_module(name, tuple(inputs))
    pooled = (
        [user for user in lookup.node.users if user.target is operator.getitem] if lookup.is_tuple else [lookup.node]
    )
    for node in pooled:
        if not lookup.is_tuple or node.args[1] == 0:
            served.meta.setdefault("val", node.meta.get("val"))
            node.replace_all_uses_with(served)
        if lookup.is_tuple:
            graph_module.graph.erase_node(node)
    graph_module.graph.erase_node(lookup.node)


def _whole_bags(inputs: tuple[fx.Node | None, ...]) -> tuple[fx.Node | None, ...]:
    """Returns the inputs of a bag with its ids of shape (bags, length) as the model gave them, where that is possible.

    A capture flattens such ids and makes up offsets. With the ids as given, a merged pull finds the batch's tensor.
    """
    ids, offsets, weights = inputs
    if ids is None or offsets is None or weights is not None:
        return inputs
    if ids.target not in (_aten.reshape.default, _aten.view.default) or ids.args[1] != [-1]:
        return inputs
    given = ids.args[0]
    if not isinstance(given, fx.Node):
        return inputs
    value = given.meta.get("val")
    is_range = offsets.target is _aten.arange.start_step and len(offsets.args) == 3 and offsets.args[0] == 0
    if not isinstance(value, Tensor) or value.ndim != 2 or not is_range:
        return inputs
    length = value.shape[1]  # a number when the capture knows it; otherwise the step must be this symbolic size
    step = offsets.args[2]
    is_length = (isinstance(step, fx.Node) and step.target is _aten.sym_size.int and step.args == (given, 1)) or (
        isinstance(step, int) and isinstance(length, int) and step == length
    )
    return (given, None, None) if is_length else inputs


def _forget(graph_module: fx.GraphModule, weight: str) -> None:
    """Deletes the weight from the lifted graph; its memory is freed together with the original program."""
    path, _, name = weight.rpartition(".")
    try:
        holder = graph_module.get_submodule(path)
    except AttributeError:  # the whole layer is gone
        return
    if name in holder._parameters:
        delattr(holder, name)


def _check(source: fx.GraphModule, lifted: fx.GraphModule, inputs: tuple[Any, ...]) -> None:
    was_training = lifted.training
    lifted.eval()
    try:
        gap = largest_gap(source, lifted, inputs)
    finally:
        lifted.train(was_training)
    if gap is not None:
        raise FailedPrecondition(
            f"lift_embeddings: output {gap[0]} differs from the program's by {gap[1]:.3g} on the inputs of check; "
            "note that a table that existed before keeps its own rows"
        )
