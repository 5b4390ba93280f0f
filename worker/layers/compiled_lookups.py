"""Has ``torch.compile`` merge the lookups of each graph that it traces, so that a compiled model makes one pull.

    Dynamo traces a layer's forward ── fuse_in_this_graph() ──> the graph's finalizer: fuse_lookups ──> backend

A layer calls the function while Dynamo traces it, so that nothing is set for the process: graphs without distributed
layers, other backends and the settings of Inductor stay as they are. The function runs when the graph is traced, and
leaves no call in the graph. Backends and their caches get the graph with its lookups merged.
"""

from __future__ import annotations

from torch import fx

__all__ = ["fuse_in_this_graph"]


def fuse_in_this_graph() -> bool:
    """Has the lookups of the graph that Dynamo traces merged before a backend gets the graph.

    Returns:
        Whether Dynamo traces a graph to be compiled. Otherwise nothing is done: an exported program keeps its lookups,
        and a torch whose Dynamo has no finalizers compiles a pull for each lookup.
    """
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator  # slow to import, but imported by then

        graph = InstructionTranslator.current_tx().output
        if graph.export:
            return False
        if _fuse not in graph.register_finalizer_fns:  # else another layer of this graph has added it
            graph.add_graph_finalizer(_fuse)
    except (ImportError, AttributeError):  # no trace of Dynamo, or one without finalizers
        return False
    return True


# As torch.compiler.assume_constant_result marks a function, without the import of Dynamo by each import of the layers.
fuse_in_this_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _fuse(module: fx.GraphModule) -> None:
    from .fuse_lookups import fuse_lookups  # slow to import

    fuse_lookups(module)
