"""The device on which a worker trains, and the backends of its process group."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from ...proto.config.train_config import TrainConfig
from ...proto.errors import InvalidArgument, not_allowed

_log = logging.getLogger(__name__)
_HOST = torch.device("cpu")


def training_device(train: TrainConfig, *, local_rank: int, local_world: int, world: int) -> torch.device:
    """Returns the device of one worker: CUDA device number ``local_rank``, or the host.

    Args:
        train: says ``device`` and where the dense tensors are.
        local_rank: the number of this worker among those of its machine, from 0.
        local_world: the number of workers on this machine.
        world: the number of workers of the job.

    Raises:
        InvalidArgument: ``train.device`` is cuda, and there is no CUDA device for each worker, or no NCCL for several
            workers; the text says what there is.
    """
    if train.is_on_host:
        return _HOST
    lack = _lack_of_cuda(local_world, world)
    if not lack:
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    if train.device == "cuda":
        raise not_allowed("train.device", "cuda", f"auto, cpu; {lack}")
    if torch.cuda.is_available():
        _log.warning("train.device: auto takes the host; %s", lack)
    return _HOST


def _lack_of_cuda(local_world: int, world: int) -> str:
    """Returns why the workers of this machine cannot train on CUDA; "" when they can."""
    if not torch.cuda.is_available():
        return f"this torch ({torch.__version__}) finds no CUDA device"
    count = torch.cuda.device_count()
    if local_world > count:
        return f"this machine has {count} CUDA devices for {local_world} workers, and each needs one of its own"
    if world > 1 and not dist.is_nccl_available():
        return f"this torch ({torch.__version__}) was built without NCCL, which several workers on CUDA need"
    return ""


def group_backend(device: torch.device) -> str:
    """Returns the backends of the workers' process group: NCCL for tensors on CUDA, gloo for those on the host."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def out_of_memory(error: torch.OutOfMemoryError, cache_bytes: int | None) -> InvalidArgument:
    """Returns the error of a step for which the device had no memory; nothing of the step was committed.

    Args:
        error: what torch raised.
        cache_bytes: of the row cache on the device; None: there is none.
    """
    first = str(error).split(". ")[0]
    if cache_bytes is not None:
        return InvalidArgument(
            f"train: {first}; the row cache has {cache_bytes} bytes of the device: lower train.cache.bytes, or "
            "train.batch_size. The step was not committed"
        )
    return InvalidArgument(f"train: {first}; lower train.batch_size or train.prefetch. The step was not committed")
