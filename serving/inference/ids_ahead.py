"""The ids of a program's lookups, computed on the host before the program runs on a device.

    program -> on the host:    the ids of its lookups alone      -> rows are pulled, and cross with the arguments
            -> on the device:  all the rest, given computed ids  -> finds its rows there

So a call has one copy to the device, and no id comes back. Lookups that wait for others, or whose ids need arithmetic
of floats, are made when the program reaches them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ...cpp_ext import _client, torch_ops as ops
from ...cpp_ext.device_pack import BatchOnDevice, described
from ...cpp_ext.device_step import StepOnDevice

_VIEWS = ("select", "slice", "view", "_unsafe_view", "unsqueeze", "squeeze", "transpose", "t", "permute", "expand")


@dataclass(frozen=True)
class HostIds:
    """The ids of one call.

    Attributes:
        lookups: the binding and the ids of each lookup, contiguous int64 on the host.
        computed: what the program on the device is given in the place of what it would compute, on the host.
    """

    lookups: Sequence[tuple[str, Tensor]]
    computed: Sequence[Tensor]

    def pulled(self) -> _client.LookupPack:
        """The rows of all lookups, in one pull.

        Raises:
            SparserowError: they cannot be pulled, or an id is out of range.
        """
        wanted = [(table, described(ids)) for table, ids in self.lookups]
        return _client.LookupPack(wanted, train=False, with_gradient=False)


class IdsAhead:
    """The part of a program that computes ids.

    Args:
        program: the program on the host, as ``ExportedProgram.module()`` gives it.
    """

    def __init__(self, program: fx.GraphModule) -> None:
        lookups = [
            (table, ids) for node in program.graph.nodes for table, ids in _lookups_of(node) if _is_of_integers(ids, {})
        ]
        self._tables = [table for table, _ in lookups]
        bases = dict.fromkeys(_base_of(ids) for _, ids in lookups)
        self._computed = [node.name for node in bases if node.op == "call_function"]
        outputs = [ids for _, ids in lookups] + [node for node in bases if node.op == "call_function"]
        self._graph = fx.GraphModule(program, _graph_of(program.graph, outputs))
        self._needed = [bool(node.users) for node in self._graph.graph.nodes if node.op == "placeholder"]

    def __bool__(self) -> bool:
        """Whether the ids of a lookup are known ahead."""
        return len(self._tables) > 0

    def on_device(self, module: fx.GraphModule) -> fx.GraphModule:
        """Changes the same program on a device, in place, so that :meth:`given` says what it does not compute."""
        nodes = {node.name: node for node in module.graph.nodes}
        for number, name in enumerate(self._computed):
            node = nodes[name]
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(module.graph.call_function(_given, (number,)))
        module.graph.eliminate_dead_code()
        module.recompile()
        return module

    def of(self, leaves: Iterable[Any]) -> HostIds:
        """Computes the ids of a call.

        Args:
            leaves: the arguments, flattened; those on a device that ids depend on are copied from there.

        Raises:
            ValueError: there are more or fewer than the program takes.
        """
        pairs = zip(leaves, self._needed, strict=True)
        made = self._graph(*(_on_host(each) if is_needed else None for each, is_needed in pairs))
        of_lookups = made[: len(self._tables)]
        ids = [each.to(torch.int64).contiguous() for each in of_lookups]
        return HostIds(list(zip(self._tables, ids, strict=True)), made[len(self._tables) :])

    @staticmethod
    @contextmanager
    def given(computed: Sequence[Tensor]) -> Iterator[None]:
        """Has programs that this thread runs meanwhile take these, on the device, for ``computed``."""
        _of_thread.given = computed
        try:
            yield
        finally:
            _of_thread.given = ()


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def sent_arguments(
    arguments: tuple[Any, ...], step: StepOnDevice, device: torch.device, ids_ahead: IdsAhead | None
) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Returns the arguments of a call on the device, and what the program is given beside them.

    What is on the host crosses in one copy, with the rows of lookups whose ids are known ahead; a cache on the device
    has those of its own.

    Args:
        arguments: of the call.
        step: what the session has on the device.
        device: of the program.
        ids_ahead: of the program; None: no lookup's ids are known ahead.
    """
    leaves, structure = pytree.tree_flatten(arguments)
    mine = [value for value in leaves if _is_on_host(value)]
    native, computed = None, []
    if ids_ahead is not None:
        ids = ids_ahead.of(leaves)
        computed = list(ids.computed)
        native = ids.pulled() if step.cache is None else None
    sent = BatchOnDevice(step.link(device), step, native, [*mine, *computed])
    if sent.pack is not None:
        step.offer(sent.pack, train=False)
    crossed = iter(sent.receive())
    there = [next(crossed) if _is_on_host(value) else value for value in leaves]
    moved: tuple[Any, ...] = pytree.tree_unflatten(there, structure)
    return moved, list(crossed)


def _is_on_host(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cpu"


_of_thread = threading.local()


def _given(number: int) -> Tensor:
    """What a program on the device takes in the place of what it would compute."""
    given: Tensor = _of_thread.given[number]
    return given


def _lookups_of(node: fx.Node) -> list[tuple[str, fx.Node]]:
    """Returns the table and the ids of each lookup that a node makes."""
    if node.op != "call_function":
        return []
    arguments: tuple[Any, ...] = node.args
    if node.target is ops.gather:
        return [(arguments[2], arguments[0])]
    if node.target is ops.gather_bag:
        return [(arguments[4], arguments[0])]
    if node.target in (ops.gather_merged, ops.gather_all):
        tables = arguments[3 if node.target is ops.gather_merged else 4]
        return list(zip(tables.split("\n"), arguments[0], strict=True))
    return []


def _is_of_integers(node: fx.Node, known: dict[fx.Node, bool]) -> bool:
    """Returns whether a node's value follows from arguments and constants by operations of integers."""
    if node not in known:
        known[node] = node.op in ("placeholder", "get_attr") or (
            node.op == "call_function"
            and not _lookups_of(node)
            and not getattr(getattr(node.target, "_schema", None), "is_mutable", False)
            and _has_integers(node.meta.get("val"))
            and all(_is_of_integers(given, known) for given in node.all_input_nodes)
        )
    return known[node]


def _has_integers(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not (value.dtype.is_floating_point or value.dtype.is_complex)
    return isinstance(value, int | torch.SymInt | torch.SymBool)


def _base_of(node: fx.Node) -> fx.Node:
    """Returns what a node is a view of; itself where it is none."""
    while node.op == "call_function" and getattr(node.target, "overloadpacket", None) is not None:
        if node.target.overloadpacket.__name__ not in _VIEWS:  # type: ignore[union-attr]
            return node
        (node, *_) = node.all_input_nodes
    return node


def _graph_of(source: fx.Graph, outputs: Sequence[fx.Node]) -> fx.Graph:
    """Returns the graph of some nodes alone; it takes all arguments, flattened."""
    needed, rest = set(outputs), list(outputs)
    while rest:
        for node in rest.pop().all_input_nodes:
            if node not in needed:
                needed.add(node)
                rest.append(node)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in source.nodes:
        if node.op == "placeholder":
            copies[node] = graph.placeholder(node.name)
        elif node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return graph
