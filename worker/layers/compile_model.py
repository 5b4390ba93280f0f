"""``compile_model``: ``torch.compile`` for a distributed model, with one lookup for all tables of a forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import fx, nn

from ...proto.errors import not_allowed
from .embedding import DistributedLayer
from .forward_pull import ForwardPull
from .fuse_lookups import fuse_lookups
from .handed_rows import SameBatch

Model = TypeVar("Model", bound=nn.Module)


class _FusedBackend:
    """A backend of ``torch.compile`` that merges lookups and hands the graph on.

    Attributes:
        graphs: the graphs that were compiled, after their lookups were merged.
    """

    def __init__(self, name: str) -> None:
        self._compile: Callable[..., Any] = torch._dynamo.lookup_backend(name)
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[torch.Tensor], **options: Any) -> Any:
        """Compiles a graph."""
        fuse_lookups(graph)
        self.graphs.append(graph)
        return self._compile(graph, inputs, **options)


def compile_model(model: Model, *, backend: str = "inductor", **options: Any) -> Model:
    """Compiles a distributed model; the lookups of a graph that do not wait for each other become one op.

    In a compiled model a lookup of its own would pull for itself, as hooks do not run there. This one op pulls for all
    tables at once, in forward, and stages the gradients of all in backward.

    Lookups that ranks make together, in a tensor group or of tables on devices, stay outside of the graphs. The
    compiled model makes all of them before its forward, as the model does.

    Args:
        model: a model after :func:`distribute`.
        backend: the name of a backend of ``torch.compile``.
        options: further arguments of ``torch.compile``, ``fullgraph`` and ``dynamic`` say.

    Returns:
        What ``torch.compile`` returns: the model, compiled at its first call.

    Raises:
        InvalidArgument: the model has no distributed layer, or torch knows no such backend.
    """
    if not any(isinstance(module, DistributedLayer) for module in model.modules()):
        raise not_allowed(
            "compile_model.model", type(model).__name__, "a model after distribute(); use torch.compile for others"
        )
    known = torch._dynamo.list_backends(exclude_tags=())
    if backend not in known:
        raise not_allowed("compile_model.backend", backend, known)
    compiled: Any = torch.compile(model, backend=_FusedBackend(backend), **options)
    if any(module.is_joint for module in model.modules() if isinstance(module, DistributedLayer)):
        _add_hooks(model, compiled)
    whole: Model = compiled
    return whole


def _add_hooks(model: nn.Module, compiled: nn.Module) -> None:
    """Adds the hooks of a model's forward to the compiled model, whose own hooks are not compiled."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    for hook in tuple(inner._forward_pre_hooks.values()):
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, SameBatch | ForwardPull):
            owner.install(compiled)
