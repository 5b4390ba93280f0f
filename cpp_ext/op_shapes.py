"""What compilers see of the ops for several lookups: shapes, dtypes and devices of what they return.

These ops take ids on the host beside an anchor or gradients on a device. A compiler that works devices out by itself
refuses that, so each op gives its own here. Those of a single lookup stay on the host, and have theirs in
``cpp_ext/ops/library.cc``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["register"]

_DIM, _MODE, _INCLUDES_LAST, _HAS_OFFSETS, _OPTIONS = 0, 1, 3, 4, 6  # cpp_ext/ops/merged_lookups.h
_ROWS_OF_IDS, _MAX = -1, 2


def _rows_of(ids: list[Tensor], offsets: list[Tensor], options: Sequence[int], device: torch.device) -> list[Tensor]:
    """The rows of each lookup: (*ids.shape, dim), or (bags, dim), float32."""
    made = []
    for i, each in enumerate(ids):
        own = options[i * _OPTIONS : (i + 1) * _OPTIONS]
        if own[_MODE] == _ROWS_OF_IDS:
            shape = list(each.shape)
        elif own[_HAS_OFFSETS]:
            shape = [offsets[i].shape[0] - own[_INCLUDES_LAST]]
        else:
            shape = [each.shape[0]]
        made.append(torch.empty([*shape, own[_DIM]], dtype=torch.float32, device=device))
    return made


def _gather_all(
    ids: list[Tensor],
    offsets: list[Tensor],
    _weights: list[Tensor],
    anchor: Tensor,
    _tables: str,
    options: Sequence[int],
    _train: bool,
) -> list[Tensor]:
    rows = _rows_of(ids, offsets, options, ids[0].device if anchor.device.type == "cpu" else anchor.device)
    modes = options[_MODE::_OPTIONS]
    return rows + [
        torch.empty_like(of, dtype=torch.int64) for of, mode in zip(rows, modes, strict=True) if mode == _MAX
    ]


def _gather_merged(
    ids: list[Tensor], offsets: list[Tensor], _weights: list[Tensor], _tables: str, options: Sequence[int]
) -> list[Tensor]:
    return _rows_of(
        ids, offsets, options, next((each.device for each in ids if each.device.type != "cpu"), ids[0].device)
    )


def _stage_all(
    grads: list[Tensor],
    _ids: list[Tensor],
    _offsets: list[Tensor],
    weights: list[Tensor],
    _places: list[Tensor],
    _tables: str,
    _options: Sequence[int],
    wants: Sequence[int],
) -> list[Tensor]:
    anchor = grads[0].new_empty(1, dtype=torch.float32)
    return [anchor, *(torch.empty_like(weights[i]) for i, wanted in enumerate(wants) if wanted)]


def register() -> None:
    """Registers them with torch; the ops are there already."""
    functions: dict[str, Callable[..., list[Tensor]]] = {
        "gather_all": _gather_all,
        "gather_merged": _gather_merged,
        "stage_all": _stage_all,
    }
    for name, function in functions.items():
        torch.library.register_fake(f"sparserow::{name}", function)
