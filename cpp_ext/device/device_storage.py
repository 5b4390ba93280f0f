"""The storage of a session's row cache on the model's device: what ``cpp_ext/session/row_storage.h`` asks for."""

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
    """``DeviceRows`` behind arrays in the host's memory: keys go to the device, rows come back, each in one copy.

    Arrays are views of the native session's memory and are not kept.

    Args:
        capacity_bytes, dim, device: as of ``DeviceRows``, which raises ValueError for them.
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
        """Fills found (n), versions (n) and rows (n, dim); those of missing keys are unspecified."""
        states, known, values = self._rows.probe(table_id, self._there(keys), oldest)
        torch.from_numpy(found).copy_(states)
        torch.from_numpy(versions.view(np.int64)).copy_(known)
        torch.from_numpy(rows).copy_(values)

    def put(
        self, table_id: int, keys: Keys, versions: NDArray[np.uint64], rows: NDArray[np.float32], validated: int
    ) -> None:
        """Puts rows (n, dim) in."""
        values = torch.from_numpy(rows).to(self._device, copy=True)
        self._rows.put(table_id, self._there(keys), self._there(versions), values, validated)

    def drop(self, table_id: int, keys: Keys) -> None:
        """These rows are gone."""
        self._rows.drop(table_id, self._there(keys))

    def _there(self, numbers: Keys) -> Tensor:
        return torch.from_numpy(numbers.view(np.int64)).to(self._device, copy=True)


def runs_on(device: torch.device) -> bool:
    """Whether the kernels run there: on CUDA, and under Triton's interpreter anywhere."""
    import triton.runtime.interpreter as interpreter

    kernel: Any = kernels.probe_kernel
    return device.type == "cuda" or isinstance(kernel, interpreter.InterpretedFunction)
