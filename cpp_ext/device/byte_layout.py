"""Several tensors in one run of bytes, so that they cross to a device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

ALIGN = 64  # bytes; as cpp_ext/session/lookup_pack.h


class ByteLayout:
    """Where each of several tensors lies in one buffer; each begins at a multiple of ``ALIGN`` bytes."""

    def __init__(self) -> None:
        self.size = 0
        self._parts: list[tuple[int, torch.dtype, tuple[int, ...]]] = []

    def reserve(self, size: int) -> int:
        """Reserves raw bytes. Returns where they begin."""
        begin = self.size
        self.size += -(-size // ALIGN) * ALIGN
        return begin

    def add(self, tensor: Tensor) -> None:
        """Adds a tensor of any strides; in the buffer it is contiguous."""
        self._parts.append((self.reserve(tensor.numel() * tensor.element_size()), tensor.dtype, tuple(tensor.shape)))

    def write(self, tensors: Sequence[Tensor], buffer: Tensor) -> None:
        """Copies the added tensors, in order, to their places in ``buffer``, (size) uint8."""
        for view, tensor in zip(self.views(buffer), tensors, strict=True):
            view.copy_(tensor)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """The added tensors as views of ``buffer``, (size) uint8 on any device."""
        return [view_of(buffer, begin, dtype, shape) for begin, dtype, shape in self._parts]


def view_of(buffer: Tensor, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor of this dtype and shape that begins at byte ``begin`` of ``buffer``, (n) uint8."""
    end = begin + prod(shape) * dtype.itemsize
    return buffer[begin:end].view(dtype).view(shape)
