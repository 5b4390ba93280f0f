"""Brings the batches of a training or evaluation loop to the device of the model."""

from __future__ import annotations

import torch

from ..data import StepBatch
from ..prefetch.device_batches import DeviceBatches
from .training_backend import TrainingBackend, stays_on_host


class BatchPlacement:
    """Copies a batch with the rows of its lookups to the device, unless a prefetch has brought them.

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
            else DeviceBatches(device, session.core.on_device.stores, stays_on_host)
        )

    def placed(self, batch: StepBatch, *, train: bool = False) -> StepBatch:
        """Returns the batch on the device of the model; its keys stay on the host where a session looks them up.

        Batch and rows cross in one copy, unless a prefetch has brought them.

        Args:
            batch: the batch.
            train: whether a training step uses it, which needs the rows with their gradients.
        """
        session = self._backend.session
        if batch.device == self._device:
            return batch
        if session is None or self._batches is None:
            return batch.to(self._device)
        pack = self._backend.pack(batch, train=train)
        sent = self._batches.send(batch, pack)
        placed: StepBatch = self._batches.receive(sent, session.core.on_device, train=train)
        return placed
