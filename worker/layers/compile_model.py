"""``compile_model``: ``torch.compile`` for a distributed model, with the hooks of lookups that ranks make together."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from ...proto.errors import not_allowed
from ..lookups.forward_hook import ForwardHook
from ..lookups.makers.same_batch import SameBatch
from .embedding import DistributedLayer

Model = TypeVar("Model", bound=nn.Module)


def compile_model(model: Model, *, backend: str = "inductor", **options: Any) -> Model:
    """Compiles a distributed model, as ``torch.compile`` does; the lookups of a graph become one op where they can.

    This one op pulls for all tables at once, in forward, and stages the gradients of all in backward.

    Lookups that ranks make together, in a tensor group or of tables on devices, stay outside of the graphs. The
    compiled model makes all of them before its forward, as the model does; under ``torch.compile`` alone each makes its
    own.

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
    compiled: Any = torch.compile(model, backend=backend, **options)
    if any(module.is_joint for module in model.modules() if isinstance(module, DistributedLayer)):
        _add_hooks(model, compiled)
    whole: Model = compiled
    return whole


def _add_hooks(model: nn.Module, compiled: nn.Module) -> None:
    """Adds the hooks of a model's forward to the compiled model, whose own hooks are not compiled."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    for hook in tuple(inner._forward_pre_hooks.values()):
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, SameBatch | ForwardHook):
            owner.install(compiled)
