"""The modules and paths of a model without what ``torch.compile`` puts around them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

_INNER = "_orig_mod"  # torch's name of the module inside a compiled one


def inside(module: nn.Module) -> nn.Module:
    """Returns the module inside a compiled one, and a module that is not compiled itself."""
    inner = module._modules.get(_INNER)
    return module if inner is None else inside(inner)


def bare(model: nn.Module) -> nn.Module:
    """Returns the model itself, without DDP and ``torch.compile`` in any order."""
    inner = inside(model)
    return bare(inner.module) if isinstance(inner, nn.parallel.DistributedDataParallel) else inner


def plain_path(path: str) -> str:
    """Returns the path of a module, parameter or entry of a ``state_dict`` as it is in the model before compilation."""
    return ".".join(part for part in path.split(".") if part != _INNER)


def set_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Replaces the module at a plain path; one that is compiled itself is replaced with what is around it.

    Args:
        model: the model, compiled or not, whose parts may be compiled.
        path: the path as :func:`plain_path` returns it.
        module: the module to put there.
    """
    *parents, name = path.split(".")
    holder = inside(model)
    for parent in parents:
        holder = inside(holder.get_submodule(parent))
    holder.set_submodule(name, module)


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the model itself, in which the modules inside stand in the place of compiled ones until the end."""
    whole = bare(model)
    compiled = [
        (holder, name, part)
        for holder in whole.modules()
        for name, part in holder._modules.items()
        if part is not None and inside(part) is not part
    ]
    try:
        for holder, name, part in compiled:
            holder._modules[name] = inside(part)
        yield whole
    finally:
        for holder, name, part in compiled:
            holder._modules[name] = part
