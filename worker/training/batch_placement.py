"""Brings the batches of a training or evaluation loop to the device of the model."""

from __future__ import annotations

import torch

from ..data import NamedBatch
from ..prefetch.device_batches import DeviceBatches
from .training_backend import TrainingBackend


class BatchPlacement:
    """Copies a batch to the device, unless a prefetch has brought it with the rows of its lookups.

    Args:
        device: the device of the model.
        backend: the backend that holds the tables.
    """

    def __init__(self, device: torch.device, backend: TrainingBackend) -> None:
        self._device, self._backend = device, backend
        session = backend.session
        self._batches = (
            None
            if device.type == "cpu" or session is None
            else DeviceBatches(device, session.core.on_device, backend.on_host)
        )

    def placed(self, batch: NamedBatch, *, train: bool = False) -> NamedBatch:
        """Returns the batch on the device of the model, after one copy unless a prefetch has brought it.

        Keys that only lookups use stay on the host.

        Args:
            batch: the batch.
            train: whether a training step uses it, which needs the rows with their gradients.
        """
        session = self._backend.session
        if batch.device == self._device:
            return batch
        if session is None or self._batches is None:
            return batch.to(self._device)
        sent = self._batches.send(batch, None)
        placed: NamedBatch = self._batches.receive(sent, train=train)
        return placed
