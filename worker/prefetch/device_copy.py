"""Copies batches to the device of the training loop while the loop computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..data.batch_tensors import map_tensors


class DeviceCopy:
    """Copies batches to one device; to CUDA through pinned memory, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, batch: Any) -> tuple[Any, torch.cuda.Event | None]:
        """Copies a batch to the device.

        Returns:
            The batch on the device, and an event that completes when the copy is done; None when it is done already.
        """
        if self._stream is None:
            return map_tensors(batch, lambda tensor: tensor.to(self._device)), None
        with torch.cuda.stream(self._stream):
            copied = map_tensors(batch, self._through_pinned)
            return copied, self._stream.record_event()

    def _through_pinned(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor.to(self._device)
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self._device, non_blocking=True)

    def wait(self, batch: Any, ready: torch.cuda.Event | None) -> None:
        """Makes the current stream wait for the copy, and keeps the batch's memory until that stream has used it.

        Args:
            batch: the batch on the device.
            ready: the event from :meth:`copy`; None: the copy is done.
        """
        if ready is None:
            return
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(ready)

        def keep(tensor: Tensor) -> Tensor:
            if tensor.is_cuda:
                tensor.record_stream(stream)
            return tensor

        map_tensors(batch, keep)
