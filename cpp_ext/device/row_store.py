"""Rows that a device keeps, in one store for each width, by place.

Which row is at which place is known on the host (``cpp_ext/session/device_directory.h``). Needs torch alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .byte_layout import ALIGN, view_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # by their numbers in cpp_ext/util/dtype.h


@dataclass(frozen=True)
class KeptRows:
    """The size of the stores of one session, and the dtype of their rows.

    Attributes:
        bytes: of the rows of all tables; 0: the device keeps none.
        dtype: the name of the dtype in which rows cross to the device and are kept there.
    """

    bytes: int = 0
    dtype: str = "float32"


@dataclass(frozen=True)
class RowPlan:
    """How the rows of one table of a pack come together.

    Attributes:
        size: unique rows of the table.
        dim: columns.
        begin: the first byte of the table's part of the pack.
        sent: rows that the pack holds.
        kept: rows that the device has.
        put: rows that the device keeps from now on.
        dtype: the dtype of the rows that the pack and the store hold.
    """

    size: int
    dim: int
    begin: int
    sent: int
    kept: int
    put: int
    dtype: torch.dtype

    def rows(self, pack: Tensor, store: Tensor | None) -> Tensor:
        """Takes rows from the store and puts others there.

        Args:
            pack: (n) uint8 on the device.
            store: (places, dim) of the dtype; None: the device keeps no rows of this width.

        Returns:
            (size, dim) float32; rows that are neither sent nor kept are unspecified.
        """
        at = self.begin
        numbers: list[Tensor] = []
        for count in (self.sent, self.kept, self.kept, self.put, self.put):
            numbers.append(view_of(pack, at, torch.int32, (count,)))
            at += -(-count * 4 // ALIGN) * ALIGN
        sent, kept, kept_at, put, put_at = numbers
        rows = torch.empty(self.size, self.dim, device=pack.device)
        crossed = view_of(pack, at, self.dtype, (self.sent, self.dim))
        rows.index_copy_(0, sent.to(torch.int64), crossed.to(torch.float32))
        if store is not None:
            rows.index_copy_(0, kept.to(torch.int64), store.index_select(0, kept_at).to(torch.float32))
            store.index_copy_(0, put_at.to(torch.int64), rows.index_select(0, put).to(self.dtype))
        return rows


class RowStores:
    """The stores of one session on its device.

    Attributes:
        order: is held while a pack is planned and sent, so that the device carries plans out in their order.

    Args:
        sizes: gives (dim, places) of each store as it is now; () while the device keeps no rows.
    """

    def __init__(self, sizes: Callable[[], list[tuple[int, int]]]) -> None:
        self.order = threading.RLock()
        self._sizes = sizes
        self._generation = -1
        self._stores: dict[int, Tensor] = {}

    def store(self, plan: RowPlan, generation: int, device: torch.device) -> Tensor | None:
        """The store of a plan's width; None where it has no place.

        Stores are made anew when the generation has changed.
        """
        if generation != self._generation:
            self._stores = {
                width: torch.empty(places, width, dtype=plan.dtype, device=device)
                for width, places in self._sizes()
                if places
            }
            self._generation = generation
        return self._stores.get(plan.dim)

    @property
    def bytes(self) -> int:
        """What the stores take of the device's memory."""
        return sum(store.numel() * store.element_size() for store in self._stores.values())
