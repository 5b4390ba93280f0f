"""A row cache in the memory of a device, by the kernels of ``cache_kernels.py``. It needs torch and triton alone."""

from __future__ import annotations

import os

import torch
import triton
from torch import Tensor

from . import cache_kernels as kernels

_BLOCK = 64
_MOST_COLUMNS = 128


class DeviceRows:
    """A cache of rows of one width, by (table id, key). The rules are those of ``cpp_ext/session/row_cache.h``.

    Calls are queued on the device's current stream; ``put`` waits for the device to count the sets that it touches.

    Args:
        capacity_bytes: the capacity in bytes, bookkeeping included; at least one set of 8 rows.
        dim: the number of float32 columns.
        device: a CUDA device; under Triton's interpreter the CPU.

    Raises:
        ValueError: ``capacity_bytes`` is too small for a set, or more than the device's memory; the text has both.
    """

    def __init__(self, capacity_bytes: int, dim: int, device: torch.device | str) -> None:
        self.device, self.dim = torch.device(device), dim
        least, memory = kernels.WAYS * self.bytes_per_row(dim), memory_of(self.device)
        if not least <= capacity_bytes <= memory:
            raise ValueError(
                f"capacity_bytes: {capacity_bytes} is not allowed for dim {dim} on {self.device}; allowed: {least} to "
                f"{memory}, the memory of the device"
            )
        self.sets = min(capacity_bytes // least, 2**31)
        places = self.sets * kernels.WAYS
        self._keys = self._zeros(places, torch.int64)
        self._tables = self._zeros(places, torch.int32)  # 0: the place is empty
        self._versions = self._zeros(places, torch.int64)
        self._validated = self._zeros(places, torch.int64)
        self._used = self._zeros(places, torch.int32)
        self._uses = self._zeros(places, torch.int32)
        self._replaced = self._zeros(self.sets, torch.int32)
        self._rows = torch.empty(places, dim, device=self.device)
        self._call = 0

    @staticmethod
    def bytes_per_row(dim: int) -> int:
        """Returns the bytes that a row of ``dim`` columns takes, bookkeeping included."""
        return 3 * 8 + 3 * 4 + 4 + 4 * dim

    def probe(self, table_id: int, keys: Tensor, oldest: int) -> tuple[Tensor, Tensor, Tensor]:
        """Looks keys up in the cache.

        Args:
            table_id: the id of the table; not 0.
            keys: the keys, (n) int64, unique, on the device.
            oldest: rows that were validated at an earlier step than this one are stale.

        Returns:
            Three tensors: states, (n) int32, with 0 for missing, 1 for stale and 2 for a hit; versions, (n) int64,
            with -1 for missing keys; and rows, (n, dim) float32, unspecified for missing keys.
        """
        n = len(keys)
        found = torch.empty(n, dtype=torch.int32, device=self.device)
        versions = torch.empty(n, dtype=torch.int64, device=self.device)
        rows = torch.empty(n, self.dim, device=self.device)
        self._call += 1
        if n:
            kernels.probe_kernel[(triton.cdiv(n, _BLOCK),)](
                keys,
                self._salt(table_id),
                self._number(oldest),
                n,
                _bits(table_id),
                self._call,
                self.sets,
                self._keys,
                self._tables,
                self._versions,
                self._validated,
                self._used,
                self._uses,
                self._rows,
                found,
                versions,
                rows,
                self.dim,
                BLOCK=_BLOCK,
                BLOCK_D=_columns(self.dim),
            )
        return found, versions, rows

    def put(self, table_id: int, keys: Tensor, versions: Tensor, rows: Tensor, validated: int) -> None:
        """Inserts rows, or replaces the rows that the cache has for the same keys, in the order given.

        Args:
            table_id: the id of the table; not 0.
            keys: the keys, (n) int64, unique, on the device.
            versions: the versions of the rows, (n) int64.
            rows: the rows, (n, dim) float32.
            validated: the step at which the shards last confirmed the rows.
        """
        self._call += 1
        if len(keys) == 0:
            return
        sets = torch.empty(len(keys), dtype=torch.int64, device=self.device)
        kernels.set_kernel[(triton.cdiv(len(keys), _BLOCK),)](
            keys, self._salt(table_id), len(keys), self.sets, sets, BLOCK=_BLOCK
        )
        order, begins = _groups(sets)
        kernels.put_kernel[(len(begins) - 1,)](
            order,
            begins,
            sets,
            keys,
            versions,
            rows.contiguous(),
            self._number(validated),
            _bits(table_id),
            self._call,
            self._keys,
            self._tables,
            self._versions,
            self._validated,
            self._used,
            self._uses,
            self._replaced,
            self._rows,
            self.dim,
            BLOCK_D=_columns(self.dim),
        )

    def drop(self, table_id: int, keys: Tensor) -> None:
        """Removes the rows of ``keys``, (n) int64."""
        if len(keys):
            kernels.drop_kernel[(triton.cdiv(len(keys), _BLOCK),)](
                keys,
                self._salt(table_id),
                len(keys),
                _bits(table_id),
                self.sets,
                self._keys,
                self._tables,
                BLOCK=_BLOCK,
            )

    def _zeros(self, n: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(n, dtype=dtype, device=self.device)

    def _number(self, value: int) -> Tensor:
        """Returns the value in a tensor, since Triton would give an argument a type that depends on its value."""
        return torch.full((1,), value, dtype=torch.int64, device=self.device)

    def _salt(self, table_id: int) -> Tensor:
        salt = table_id * kernels.TABLE_SALT % 2**64
        return self._number(salt - 2**64 if salt >= 2**63 else salt)


def sum_by_key(grads: Tensor, inverse: Tensor) -> Tensor:
    """Sums gradients by key, in the order of the ids.

    Args:
        grads: the gradients, (n, dim) float32.
        inverse: the number of the key of each id, (n) int64; every number from 0 to the largest occurs.

    Returns:
        The sums, (keys, dim) float32.
    """
    dim = grads.shape[1]
    order, begins = _groups(inverse)
    sums = torch.empty(len(begins) - 1, dim, device=grads.device)
    columns = _columns(dim)
    if len(sums):
        grid = (len(sums), triton.cdiv(dim, columns))
        kernels.sum_kernel[grid](order, begins, grads.contiguous(), sums, dim, BLOCK_D=columns)
    return sums


def _groups(members: Tensor) -> tuple[Tensor, Tensor]:
    """Sorts positions by group.

    Args:
        members: the group of each position, (n) int64.

    Returns:
        The positions in the order of their groups, (n), and where each group begins, followed by the end,
        (groups + 1).
    """
    ordered, order = torch.sort(members, stable=True)
    sizes = torch.unique_consecutive(ordered, return_counts=True)[1]
    return order, torch.nn.functional.pad(torch.cumsum(sizes, 0), (1, 0))


def _bits(table_id: int) -> int:
    """Returns an unsigned table id as the int32 with the same bits."""
    return table_id - 2**32 if table_id >= 2**31 else table_id


def _columns(dim: int) -> int:
    return min(int(triton.next_power_of_2(dim)), _MOST_COLUMNS)


def memory_of(device: torch.device) -> int:
    """Returns the size of the device's memory, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
