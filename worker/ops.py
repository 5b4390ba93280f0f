"""Loads ``torch.ops.sparserow`` and turns the ops' errors into the taxonomy's.

The ops are C++ (cpp_ext/ops); this module is all the Python they need. Importing it registers them and tells
compilers that staging a gradient is an effect: without that, two equal backward calls in one compiled graph
would be merged into one and half of the gradient would be lost.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.fx.node import has_side_effect

from .. import cpp_ext
from ..proto import errors

__all__ = ["gather", "gather_bag", "gather_merged", "stage", "typed_error"]


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


def typed_error(error: Exception) -> Exception:
    """The error of the taxonomy that an op's error stands for, or ``error`` itself when it is not one of ours."""
    name, colon, message = str(error).partition(": ")
    kind: Any = getattr(errors, name, None) if colon else None
    if isinstance(kind, type) and issubclass(kind, errors.SparserowError):
        return kind(message)
    return error
