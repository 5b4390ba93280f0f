"""Registers ``torch.ops.sparserow`` with torch.

The ops are C++ (cpp_ext/ops), and this module is all the Python that they need. Importing it registers them and shows
compilers that staging a gradient is an effect. Otherwise two equal backward calls in one compiled graph would be merged
into one, and half of the gradient would be lost.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.fx.node import has_side_effect

from .. import cpp_ext
from . import op_shapes

__all__ = ["gather", "gather_all", "gather_bag", "gather_merged", "is_operator", "stage", "stage_all"]


def _load() -> None:
    torch.ops.load_library(str(cpp_ext.operators_of(torch.__version__)))
    op_shapes.register()
    for op in (
        torch.ops.sparserow.stage.default,
        torch.ops.sparserow.stage_bag.default,
        torch.ops.sparserow.stage_all.default,
    ):
        has_side_effect(op)
        _register_effectful_op(op, _EffectType.ORDERED)


def _on_device(name: str) -> Callable[..., Any]:
    """The kernel of an op for anchors on a device; it is imported at its first call, since it needs the session."""

    def kernel(*args: Any) -> Any:
        from . import device_ops

        return getattr(device_ops, name)(*args)

    return kernel


_OF_MANY = ("gather_all", "stage_all", "gather_merged")
_OF_ONE = ("gather", "gather_bag")  # which call those of the host where they train


def _register_device_kernels(names: Sequence[str], *keys: str, overrides: bool = False) -> torch.library.Library:
    library = torch.library.Library("sparserow", "IMPL")
    for name in names:
        for key in keys:
            library.impl(name, _on_device(name), key, allow_override=overrides)
    return library


@contextmanager
def device_lookups_on_host() -> Iterator[None]:
    """Has lookups of layers on the host made as those on devices are, for tests and benchmarks without a device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns of a kernel that takes another's place
        library = _register_device_kernels(_OF_MANY, "CPU", overrides=True)
    try:
        yield
    finally:
        library._destroy()


_load()
# Unregistered when it is deleted.
_device_kernels = _register_device_kernels((*_OF_MANY, *_OF_ONE), "CUDA", "PrivateUse1")
gather = torch.ops.sparserow.gather.default
gather_bag = torch.ops.sparserow.gather_bag.default
gather_all = torch.ops.sparserow.gather_all.default
gather_merged = torch.ops.sparserow.gather_merged.default
stage = torch.ops.sparserow.stage.default
stage_all = torch.ops.sparserow.stage_all.default


def is_operator(namespace: str, name: str, overload: str) -> bool:
    """Returns whether ``torch.ops.NAMESPACE.NAME.OVERLOAD`` is an operator that is registered with torch.

    Args:
        namespace: the namespace of the operator, such as "aten".
        name: the name of the operator.
        overload: the name of the overload, such as "default".
    """
    library = getattr(torch.ops, namespace, None)
    packet = getattr(library, name, None) if isinstance(library, torch._ops._OpNamespace) else None
    return isinstance(packet, torch._ops.OpOverloadPacket) and isinstance(
        getattr(packet, overload, None), torch._ops.OpOverload
    )
