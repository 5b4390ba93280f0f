"""The dense tower of ``bench gpu`` under DDP in a job of one rank, by NCCL or by gloo."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_DEADLINE = datetime.timedelta(minutes=2)
_BACKENDS = {"cpu": ("gloo",), "cuda": ("nccl", "gloo")}


def backends_of(device: torch.device) -> tuple[str, ...]:
    """Returns the backends that reduce gradients of a device; () for kinds of devices that DDP does not know."""
    return tuple(name for name in _BACKENDS.get(device.type, ()) if name == "gloo" or dist.is_nccl_available())


@contextmanager
def job_of_one_rank(device: torch.device) -> Iterator[Callable[[nn.Module, str], nn.Module]]:
    """Yields a function that wraps a model, (model, backend), so that backward reduces its gradients by that backend.

    Args:
        device: the device of the models; on one without a backend no process group is made.
    """
    backends = backends_of(device)
    if backends:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=_DEADLINE)
    try:
        groups: dict[str, Any] = {name: dist.new_group(backend=name, timeout=_DEADLINE) for name in backends}
        yield lambda model, backend: DistributedDataParallel(model, process_group=groups[backend])
    finally:
        if backends:
            dist.destroy_process_group()
