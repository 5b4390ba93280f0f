"""Merges the independent lookups of a graph into one op, so that they make one round trip.

``merge_lookups`` serves graphs that are called and not trained: an exported program, or one captured by ``torch.fx``.
``fuse_lookups`` serves the graphs of ``torch.compile`` (compiled_lookups.py), whose lookups train. A model that is not
compiled has its lookups made by worker/lookups, with a plan learnt from the first batch.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from ...cpp_ext import torch_ops as ops
from ...proto.errors import FailedPrecondition, not_allowed
from ..lookups.planned_layer import ROWS_OF_IDS, PlannedLayer
from .graph_check import largest_gap

_WRITES = {operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv}


@dataclass(frozen=True)
class _Lookup:
    """A lookup of the graph, with the arguments that the op gather_merged takes."""

    node: fx.Node
    table: str
    dim: int
    ids: fx.Node
    mode: int = ROWS_OF_IDS
    padding_idx: int = -1
    includes_last: bool = False
    offsets: fx.Node | None = None
    weights: fx.Node | None = None
    is_tuple: bool = False  # whether the node's value is (rows, where they came from)
    dtype: torch.dtype = torch.float32
    anchor: fx.Node | None = None  # what makes autograd record a lookup that trains; None: it does not train

    @property
    def inputs(self) -> tuple[fx.Node, ...]:
        return tuple(node for node in (self.ids, self.offsets, self.weights, self.anchor) if node is not None)

    @property
    def options(self) -> list[int]:
        has = (int(self.offsets is not None), int(self.weights is not None))
        return [self.dim, self.mode, self.padding_idx, int(self.includes_last), *has]


def merge_lookups(program: ExportedProgram | fx.GraphModule, *, check: Sequence[Any] | None = None) -> fx.GraphModule:
    """Merges lookups in distributed tables that do not depend on each other into one op for each round.

    The lookups of a round may be in several tables. A lookup that depends on another lookup's result belongs to the
    next round. Lookups are Sparserow's ops outside of training, and layers that the tracer left whole; put a model into
    eval mode before it is captured.

    Args:
        program: the program to rewrite, which is not changed. A graph module shares its parameters with the result.
        check: inputs on which the result must equal the program, to 1e-6 of the largest value. None: no check.

    Returns:
        A module to call or to export again; its lookups are without gradient.

    Raises:
        InvalidArgument: ``program`` is neither an exported program nor a graph module.
        FailedPrecondition: ``check`` failed.
    """
    source = program.module() if isinstance(program, ExportedProgram) else program
    if not isinstance(source, fx.GraphModule):
        raise not_allowed("merge_lookups.program: type", type(program).__name__, "ExportedProgram, fx.GraphModule")
    merged = fx.GraphModule(source, copy.deepcopy(source.graph))
    merged.train(source.training)
    fuse_lookups(merged)
    # What only the lookups used would else be published with the program: the anchors of layers.
    merged.graph.eliminate_dead_code(_has_effect)
    merged.recompile()
    merged.delete_all_unused_submodules()
    gap = largest_gap(source, merged, check) if check is not None else None
    if gap is not None:
        raise FailedPrecondition(f"merge_lookups: output {gap[0]} differs from the program's by {gap[1]:.3g}")
    return merged


def fuse_lookups(module: fx.GraphModule) -> None:
    """Merges the lookups of a graph in place, those that train by one op and the others by another one.

    Other nodes stay, whether something uses them or not: some begin or end a mode. A graph of fewer than two
    lookups is not changed.
    """
    rounds = _rounds(module)
    for lookups in rounds:
        _merge(module, lookups)
    if rounds:
        module.graph.lint()
        module.recompile()


def count_merged(module: fx.GraphModule) -> int:
    """Returns the number of lookups of a graph that share a round trip with other lookups."""
    merged = [node for node in module.graph.nodes if node.target in (ops.gather_merged, ops.gather_all)]
    return sum(len(node.args[0]) for node in merged)


def _rounds(module: fx.GraphModule) -> list[list[_Lookup]]:
    """Returns the rounds of lookups that one op can make; rounds of one are left out.

    The lookups of a round wait for equally many lookups. No node between them writes to a tensor or changes a mode, as
    the begin of ``no_grad`` does. Lookups that train and lookups that do not are in rounds of their own, and so are
    those whose rows go to different devices.
    """
    depth: dict[fx.Node, int] = {}
    rounds: dict[tuple[int, int, str], list[_Lookup]] = {}
    region = 0
    for node in module.graph.nodes:
        region += _changes_something(node) or _changes_mode(node)
        depth[node] = max((depth[given] for given in node.all_input_nodes), default=0)
        lookup = _lookup_of(module, node)
        if lookup is not None:
            rounds.setdefault((region, depth[node], _use_of(lookup.anchor)), []).append(lookup)
            depth[node] += 1
    return [lookups for _, lookups in sorted(rounds.items(), key=operator.itemgetter(0)) if len(lookups) > 1]


def _use_of(anchor: fx.Node | None) -> str:
    """Returns what an anchor says of its lookup's rows: their device, and whether they have a gradient."""
    if anchor is None:
        return ""
    tensor = anchor.meta.get("example_value", anchor.meta.get("val"))
    return f"{tensor.device} {tensor.requires_grad}" if isinstance(tensor, torch.Tensor) else "anchor"


def _lookup_of(module: fx.GraphModule, node: fx.Node) -> _Lookup | None:
    if node.op == "call_module":
        return _of_layer(node, module.get_submodule(str(node.target)))
    if node.op != "call_function" or node.kwargs:
        return None
    if node.target is ops.gather:
        ids, anchor, table, dim, padding, train = node.args
        trains = _node(anchor) if train else None
        return _Lookup(node, str(table), _int(dim), _node(ids), padding_idx=_int(padding), anchor=trains)
    if node.target is ops.gather_bag:
        ids, offsets, anchor, weights, table, dim, mode, padding, includes_last, train = node.args
        options = (dim, mode, padding, includes_last)
        return _of_bag(node, table, ids, offsets, weights, anchor if train else None, options)
    if node.target is ops.gather_all and len(node.args[0]) == 1:  # type: ignore[arg-type]
        return _of_one(node)
    return None


def _of_one(node: fx.Node) -> _Lookup | None:
    """Returns the lookup of a ``gather_all`` of one table, as layers on a device make it; None where more is used."""
    given: tuple[Any, ...] = node.args
    (ids,), (offsets,), (weights,), anchor, table, options, train = given
    *shared, has_offsets, has_weights = options
    offsets, weights = offsets if has_offsets else None, weights if has_weights else None
    return _of_bag(node, table, ids, offsets, weights, anchor if train else None, tuple(shared))


def _of_bag(
    node: fx.Node, table: Any, ids: Any, offsets: Any, weights: Any, anchor: Any, options: tuple[Any, ...]
) -> _Lookup | None:
    """Returns the lookup of an op that gives a tuple, given (dim, mode, padding, includes_last) as its options.

    Returns None where more than the first of the tuple is used.
    """
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in node.users if user.users):
        return None
    dim, mode, padding, includes_last = options
    return _Lookup(
        node,
        str(table),
        _int(dim),
        _node(ids),
        _int(mode),
        _int(padding),
        bool(includes_last),
        None if offsets is None else _node(offsets),
        None if weights is None else _node(weights),
        is_tuple=True,
        anchor=None if anchor is None else _node(anchor),
    )


def _of_layer(node: fx.Node, layer: torch.nn.Module) -> _Lookup | None:
    if not isinstance(layer, PlannedLayer) or layer.training:
        return None
    names = ["input", "offsets", "per_sample_weights"]
    arguments: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return _Lookup(
        node,
        layer.binding,
        layer.embedding_dim,
        arguments["input"],
        layer.mode_number,
        layer.padding_number,
        layer.include_last_offset,
        arguments.get("offsets"),
        arguments.get("per_sample_weights"),
        dtype=layer.dtype,
    )


def _node(value: Any) -> fx.Node:
    assert isinstance(value, fx.Node)
    return value


def _int(value: Any) -> int:
    assert isinstance(value, int)
    return value


def _merge(module: fx.GraphModule, together: list[_Lookup]) -> None:
    """Puts one op in the place of a round's first lookup, after every node that the inputs of the lookups need."""
    graph = module.graph
    order = {node: place for place, node in enumerate(graph.nodes)}
    first = min((lookup.node for lookup in together), key=lambda node: order[node])
    for lookup in together:
        _pull_up(lookup, first, order)
    with graph.inserting_before(first):
        tensors = (
            [lookup.ids for lookup in together],
            [lookup.offsets or lookup.ids for lookup in together],  # the ids fill the place of absent offsets
            [lookup.weights or lookup.ids for lookup in together],
        )
        tables = "\n".join(lookup.table for lookup in together)
        options = [number for lookup in together for number in lookup.options]
        anchor = together[0].anchor
        if anchor is None:
            merged = graph.call_function(ops.gather_merged, (*tensors, tables, options))
        else:
            merged = graph.call_function(ops.gather_all, (*tensors, anchor, tables, options, True))
        results = [graph.call_function(operator.getitem, (merged, index)) for index in range(len(together))]
        for index, lookup in enumerate(together):
            if lookup.dtype != torch.float32:
                results[index] = graph.call_method("to", (results[index], lookup.dtype))
    for lookup, rows in zip(together, results, strict=True):
        _replace(graph, lookup, rows)
        _erase_unused(graph, lookup.anchor)


def _erase_unused(graph: fx.Graph, anchor: fx.Node | None) -> None:
    """Erases an anchor that nothing uses any more, with the nodes that made it."""
    rest = [] if anchor is None else [anchor]
    while rest:
        node = rest.pop()
        if not node.users and node.op != "placeholder":
            rest.extend(node.all_input_nodes)
            graph.erase_node(node)


def _pull_up(lookup: _Lookup, first: fx.Node, order: dict[fx.Node, int]) -> None:
    """Moves the nodes that the lookup's inputs need to before ``first``; no node between the two has an effect."""
    needed: set[fx.Node] = set()
    rest = [node for node in lookup.inputs if order[node] > order[first]]
    while rest:
        node = rest.pop()
        if node in needed:
            continue
        needed.add(node)
        rest.extend(given for given in node.all_input_nodes if order[given] > order[first])
    for node in sorted(needed, key=lambda node: order[node]):
        first.prepend(node)
    for place, node in enumerate(first.graph.nodes):
        order[node] = place


def _has_effect(node: fx.Node) -> bool:
    """Returns whether a node stays where nothing uses its value."""
    return node.op == "call_module" or node.is_impure() or _changes_something(node) or _changes_mode(node)


def _changes_something(node: fx.Node) -> bool:
    """Returns whether a node may write to a tensor that another node reads.

    Checks of inputs are modules or asserts, which only read.
    """
    if node.op == "call_method":
        return str(node.target).endswith("_")
    schema = getattr(node.target, "_schema", None)
    if node.op == "call_function" and schema is None:
        return "out" in node.kwargs or node.target in _WRITES or str(node.kwargs.get("inplace")) == "True"
    return bool(schema is not None and schema.is_mutable)


def _changes_mode(node: fx.Node) -> bool:
    """Returns whether the nodes after a node are computed in another mode: of autograd, autocast or a transform."""
    if node.op != "call_function" or hasattr(node.target, "_schema"):
        return False
    if node.target is torch._C._set_grad_enabled:
        return True
    named, module = (str(getattr(node.target, name, "")) for name in ("__name__", "__module__"))
    is_for_effect = not node.users and module.startswith("torch.") and not named.startswith(("_assert", "_check"))
    return is_for_effect or named.startswith(("_enter_", "_exit_"))


def _replace(graph: fx.Graph, lookup: _Lookup, rows: fx.Node) -> None:
    pooled = list(lookup.node.users) if lookup.is_tuple else [lookup.node]
    for node in pooled:
        if not lookup.is_tuple or node.args[1] == 0:
            node.replace_all_uses_with(rows)
        if lookup.is_tuple:
            graph.erase_node(node)
    graph.erase_node(lookup.node)
