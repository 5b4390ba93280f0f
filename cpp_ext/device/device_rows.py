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
    """Rows of tables of one width, by (table id, key). The rules are those of ``cpp_ext/session/row_cache.h``.

    Calls are queued on the device's current stream; ``put`` waits for the number of sets it touches.

    Args:
        capacity_bytes: of rows with their bookkeeping; at least one set of 8 rows.
        dim: columns of float32.
        device: a CUDA device; under Triton's interpreter the CPU.

    Raises:
        ValueError: ``capacity_bytes`` is too small, or more than the device has (names both).
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
        """Of a row with its bookkeeping."""
        return 3 * 8 + 3 * 4 + 4 + 4 * dim

    def probe(self, table_id: int, keys: Tensor, oldest: int) -> tuple[Tensor, Tensor, Tensor]:
        """What is here of ``keys`` (n) int64, unique.

        Args:
            table_id: not 0.
            keys: on the device.
            oldest: rows validated at an earlier step are stale.

        Returns:
            (n) int32, 0 missing, 1 stale, 2 a hit; (n) int64 versions, -1 of the missing; (n, dim) float32 rows,
            unspecified of the missing.
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
        """Puts rows (n, dim) of unique ``keys`` (n) in, or in place of what is there, in order."""
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
        """Rows of ``keys`` (n) are gone."""
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
        """In memory, since Triton gives an argument the type that fits its value."""
        return torch.full((1,), value, dtype=torch.int64, device=self.device)

    def _salt(self, table_id: int) -> Tensor:
        salt = table_id * kernels.TABLE_SALT % 2**64
        return self._number(salt - 2**64 if salt >= 2**63 else salt)


def sum_by_key(grads: Tensor, inverse: Tensor) -> Tensor:
    """Sums of gradients by key, added in the order of the ids.

    Args:
        grads: (n, dim) float32.
        inverse: (n) int64, which key each id is; every key from 0 to the largest has one.

    Returns:
        (keys, dim) float32.
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
    """Positions by the group that ``members`` (n) names, and where each group that is there begins, with the end."""
    ordered, order = torch.sort(members, stable=True)
    sizes = torch.unique_consecutive(ordered, return_counts=True)[1]
    return order, torch.nn.functional.pad(torch.cumsum(sizes, 0), (1, 0))


def _bits(table_id: int) -> int:
    """An unsigned table id as int32."""
    return table_id - 2**32 if table_id >= 2**31 else table_id


def _columns(dim: int) -> int:
    return min(int(triton.next_power_of_2(dim)), _MOST_COLUMNS)


def memory_of(device: torch.device) -> int:
    """Bytes that the device has."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
