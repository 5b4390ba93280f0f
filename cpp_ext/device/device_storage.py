"""Stores a session's row cache on the model's device; it implements ``cpp_ext/session/row_storage.h``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import cache_kernels as kernels
from .device_rows import DeviceRows

Keys = NDArray[np.uint64]


class DeviceStorage:
    """Gives access to ``DeviceRows`` with arrays in host memory; keys and rows are each transferred in one copy.

    Arrays are views of the native session's memory, and are not kept after a call.

    Args:
        capacity_bytes: the capacity in bytes, bookkeeping included.
        dim: the number of float32 columns.
        device: the device that holds the rows.

    Raises:
        ValueError: ``DeviceRows`` refuses ``capacity_bytes``.
    """

    def __init__(self, capacity_bytes: int, dim: int, device: torch.device) -> None:
        self._rows = DeviceRows(capacity_bytes, dim, device)
        self._device = device

    def probe(
        self,
        table_id: int,
        keys: Keys,
        oldest: int,
        found: NDArray[np.uint8],
        versions: NDArray[np.uint64],
        rows: NDArray[np.float32],
    ) -> None:
        """Looks ``keys``, (n), up and fills ``found`` (n), ``versions`` (n) and ``rows`` (n, dim).

        The rows of missing keys are unspecified; see ``DeviceRows.probe`` for the values.
        """
        states, known, values = self._rows.probe(table_id, self._there(keys), oldest)
        torch.from_numpy(found).copy_(states)
        torch.from_numpy(versions.view(np.int64)).copy_(known)
        torch.from_numpy(rows).copy_(values)

    def put(
        self, table_id: int, keys: Keys, versions: NDArray[np.uint64], rows: NDArray[np.float32], validated: int
    ) -> None:
        """Inserts rows, or replaces the rows of the same keys; see ``DeviceRows.put`` for the arguments."""
        values = torch.from_numpy(rows).to(self._device, copy=True)
        self._rows.put(table_id, self._there(keys), self._there(versions), values, validated)

    def drop(self, table_id: int, keys: Keys) -> None:
        """Removes the rows of ``keys``, (n)."""
        self._rows.drop(table_id, self._there(keys))

    def _there(self, numbers: Keys) -> Tensor:
        return torch.from_numpy(numbers.view(np.int64)).to(self._device, copy=True)


def runs_on(device: torch.device) -> bool:
    """Returns whether the kernels run on a device: on CUDA always, elsewhere only under Triton's interpreter."""
    import triton.runtime.interpreter as interpreter

    kernel: Any = kernels.probe_kernel
    return device.type == "cuda" or isinstance(kernel, interpreter.InterpretedFunction)
