"""The weight of a worker's loss by its share of the samples of a step, where the gradients of workers are averaged.

Batches differ at the end of an epoch, and wherever samples are left out: malformed ones, or negatives. The average over
workers of means over batches would weigh a sample of a short batch more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..session.join import collective_device
from .process_group import WorkerGroup


class Due(NamedTuple):
    """What the first worker finds due between this step and the next.

    Attributes:
        test: a test of the model.
        publication: a publication of the model.
        return_: a return to a checkpoint, as the loss has jumped.
    """

    test: bool = False
    publication: bool = False
    return_: bool = False


NOTHING_DUE = Due()


class SampleShare:
    """This worker's samples of a step times the number of workers, by the samples of all of them.

    The exchange begins when this is made, before the forward, and ends when the weight is asked for, after it. Every
    rank makes one in each step. A worker that meets no others has the weight 1.

    Args:
        count: the number of this worker's samples.
        group: this worker and its peers.
        due: what this worker finds due; it goes with the exchange.
    """

    def __init__(self, count: int, group: WorkerGroup, due: Due = NOTHING_DUE) -> None:
        self._count, self._due = count, due
        self._total: torch.Tensor | None = None
        self._work: Any = None
        if not group.is_alone:
            self._total = torch.tensor([count, *due], dtype=torch.float32, device=collective_device())
            self._work = dist.all_reduce(self._total, async_op=True)

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns a loss times the weight, for which the host does not wait where the exchange is on a device.

        The loss of a batch without samples is 0 and stays as it is.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._total is None or self._count == 0:
            return loss
        return loss * (self._count * dist.get_world_size() / self._total[0].to(loss.device))

    @property
    def due(self) -> Due:
        """What any worker of the step found due; call :meth:`weigh` first.

        Where the exchange is on a device, the host waits for it.
        """
        return self._due if self._total is None else Due(*(value > 0 for value in self._total[1:].tolist()))
