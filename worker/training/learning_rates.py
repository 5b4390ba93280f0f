"""Learning rates over time: torch's schedulers on the dense optimizer and on the tables' alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, StepLR

from ...proto.config.schedule import CosineSchedule, LinearSchedule, ScheduleConfig, StepSchedule
from ...proto.errors import InvalidArgument

# A scheduler, and after how many steps it rests (None: never). All of torch's that are used here multiply what
# another one left, so they and ``scale`` can be combined.
_Part = tuple[LRScheduler, int | None]


class LearningRates:
    """Sets ``lr`` of every parameter group, step by step.

    Args:
        schedule: what the rates follow; a warmup multiplies it.
        optimizers: all alike.
    """

    def __init__(self, schedule: ScheduleConfig, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = tuple(optimizers)
        self._done = 0
        makers: list[Callable[[Optimizer], _Part]] = []
        if schedule.warmup_steps > 1:
            makers.append(lambda optimizer: _warmup(optimizer, schedule.warmup_steps))
        if schedule.kind != "constant":
            makers.append(lambda optimizer: _main(optimizer, schedule))
        self._parts = [make(optimizer) for make in makers for optimizer in self._optimizers]

    def step(self) -> None:
        """After each step that was taken."""
        for scheduler, rests_after in self._parts:
            if rests_after is None or self._done < rests_after:
                scheduler.step()
        self._done += 1

    def state_dict(self) -> dict[str, Any]:
        """How far the schedules are; the rates themselves are the optimizers' to keep."""
        return {"done": self._done, "schedulers": [scheduler.state_dict() for scheduler, _ in self._parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where ``state`` was taken.

        Raises:
            InvalidArgument: it is of another schedule.
        """
        if len(state["schedulers"]) != len(self._parts):
            raise InvalidArgument("train.schedule: is another one than in the checkpoint")
        self._done = state["done"]
        for (scheduler, _), saved in zip(self._parts, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)

    def scale(self, factor: float) -> None:
        """Multiplies all rates from now on."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= factor


def _warmup(optimizer: Optimizer, steps: int) -> _Part:
    return LinearLR(optimizer, start_factor=1 / steps, total_iters=steps - 1), steps - 1


def _main(optimizer: Optimizer, schedule: ScheduleConfig) -> _Part:
    if isinstance(schedule, StepSchedule):
        return StepLR(optimizer, schedule.every_steps, schedule.factor), None
    if isinstance(schedule, CosineSchedule):
        return CosineAnnealingLR(optimizer, schedule.total_steps), schedule.total_steps
    assert isinstance(schedule, LinearSchedule)
    scheduler = LinearLR(
        optimizer, start_factor=1.0, end_factor=schedule.final_factor, total_iters=schedule.total_steps
    )
    return scheduler, schedule.total_steps
