"""Batches on their way to the device of the training loop: their tensors and their lookups' rows cross in one copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...cpp_ext import _client
from ...cpp_ext.device.link import link_of
from ...cpp_ext.device_pack import BatchOnDevice
from ...cpp_ext.device_step import StepOnDevice
from ..data.batch_tensors import map_tensors


@dataclass(frozen=True)
class SentBatch:
    """A batch that was sent.

    Attributes:
        host: the batch as the loader gave it.
        sent: those of its tensors that cross, and the pack of its lookups.
        stays: for each tensor of the batch, whether it stays where it is.
    """

    host: Any
    sent: BatchOnDevice
    stays: tuple[bool, ...]


class DeviceBatches:
    """Sends batches to one device.

    Args:
        device: the device.
        step: what the session's step has on the device.
        on_host: names the tensors of a batch that stay on the host; None: every one crosses.
    """

    def __init__(
        self, device: torch.device, step: StepOnDevice, on_host: Callable[[Any], Sequence[Tensor]] | None = None
    ) -> None:
        self._device, self._step, self._on_host = device, step, on_host
        self._link = link_of(device)

    def send(self, host: Any, pack: _client.LookupPack | None) -> SentBatch:
        """Begins to copy a batch and the rows of its lookups.

        Args:
            host: the batch, on the host.
            pack: of its lookups; None: it has none.
        """
        stay = () if self._on_host is None else tuple(self._on_host(host))
        tensors = _in_order(host)
        stays = tuple(tensor.device.type != "cpu" or any(tensor is one for one in stay) for tensor in tensors)
        crossing = [tensor.detach() for tensor, kept in zip(tensors, stays, strict=True) if not kept]
        return SentBatch(host, BatchOnDevice(self._link, self._step, pack, crossing), stays)

    def receive(self, batch: SentBatch, *, train: bool = True) -> Any:
        """The batch as the loop sees it; lookups find its rows from now on.

        Args:
            batch: what was sent.
            train: whether the lookups are those of a step, or else of one forward of an evaluation.
        """
        self._step.link(self._device)
        pack = batch.sent.pack
        if pack is not None:
            pack.send_fresh()
            self._step.offer(pack, train=train)
        there, stays = iter(batch.sent.receive()), iter(batch.stays)
        return map_tensors(batch.host, lambda tensor: tensor if next(stays) else next(there))


def _in_order(batch: Any) -> list[Tensor]:
    """The tensors of a batch in the order in which ``map_tensors`` meets them."""
    met: list[Tensor] = []

    def meet(tensor: Tensor) -> Tensor:
        met.append(tensor)
        return tensor

    map_tensors(batch, meet)
    return met
