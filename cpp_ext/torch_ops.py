"""Registers ``torch.ops.sparserow`` with torch.

The ops are C++ (cpp_ext/ops), and this module is all the Python that they need. Importing it registers them and tells
compilers that staging a gradient is an effect. Otherwise two equal backward calls in one compiled graph would be merged
into one, and half of the gradient would be lost.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.fx.node import has_side_effect

from .. import cpp_ext

__all__ = ["gather", "gather_bag", "gather_merged", "is_operator", "stage"]


def _load() -> None:
    torch.ops.load_library(str(Path(cpp_ext.__file__).parent / "libsparserow_ops.so"))
    for op in (torch.ops.sparserow.stage.default, torch.ops.sparserow.stage_bag.default):
        has_side_effect(op)
        _register_effectful_op(op, _EffectType.ORDERED)


_load()
gather = torch.ops.sparserow.gather.default
gather_bag = torch.ops.sparserow.gather_bag.default
gather_merged = torch.ops.sparserow.gather_merged.default
stage = torch.ops.sparserow.stage.default


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
