"""Schedules learning rates: applies torch's schedulers to the dense optimizer and to that of the tables alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, StepLR

from ...proto.config.schedule import CosineSchedule, LinearSchedule, ScheduleConfig, StepSchedule
from ...proto.errors import InvalidArgument

# A scheduler, and the number of steps after which it stops (None: never). All of torch's schedulers that are used here
# multiply the present rate, so they can be combined.
_Part = tuple[LRScheduler, int | None]


class LearningRates:
    """Sets ``lr`` of every parameter group, step by step, and epoch by epoch where the schedule counts those.

    Args:
        schedule: the schedule of the rates; a warmup multiplies it.
        optimizers: the optimizers; all of them follow the same schedule.
    """

    def __init__(self, schedule: ScheduleConfig, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = tuple(optimizers)
        self._given = tuple({name: _options(group) for name, group in _groups(each)} for each in self._optimizers)
        self._saved: list[dict[str, float]] | None = None  # the rates of the job that saved the state, if it is known
        self._done = 0
        self._epoch = 1
        makers: list[Callable[[Optimizer], _Part]] = []
        if schedule.warmup_steps > 1:
            makers.append(lambda optimizer: _warmup(optimizer, schedule.warmup_steps))
        by_epoch = schedule.every_epochs if isinstance(schedule, StepSchedule) else None
        if schedule.kind != "constant" and by_epoch is None:
            makers.append(lambda optimizer: _main(optimizer, schedule))
        self._parts = [make(optimizer) for make in makers for optimizer in self._optimizers]
        self._by_epoch: list[LRScheduler] = []
        if isinstance(schedule, StepSchedule) and by_epoch is not None:
            self._by_epoch = [StepLR(optimizer, by_epoch, schedule.factor) for optimizer in self._optimizers]

    def step(self) -> None:
        """Moves the schedules on by one step. It is called after each step that was taken."""
        for scheduler, rests_after in self._parts:
            if rests_after is None or self._done < rests_after:
                scheduler.step()
        self._done += 1

    @property
    def done(self) -> int:
        """The number of steps that the schedules have been moved on by."""
        return self._done

    def begin_at(self, steps: int) -> None:
        """Moves the schedules on to where they are after so many steps, for a worker that joins a running job."""
        with _no_warning_of_order():
            while self._done < steps and any(rests is None or self._done < rests for _, rests in self._parts):
                self.step()
        self._done = max(self._done, steps)

    def begin_epoch(self, epoch: int) -> None:
        """Moves a schedule that counts epochs on to where it is in an epoch, from 1."""
        with _no_warning_of_order():  # because a worker that joins has made no step of the epochs before
            while self._epoch < epoch:
                for scheduler in self._by_epoch:
                    scheduler.step()
                self._epoch += 1

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the schedules, and the rates that the job gives.

        The rates of the moment are in the state of the optimizers.
        """
        return {
            "done": self._done,
            "epoch": self._epoch,
            "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
            "rates": [{name: options["lr"] for name, options in given.items()} for given in self._given],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a position that :meth:`state_dict` returned.

        Raises:
            InvalidArgument: the state is of another schedule.
        """
        if len(state["schedulers"]) != len(self._schedulers):
            raise InvalidArgument("train.schedule: the schedule differs from the one in the checkpoint")
        self._done, self._epoch, self._saved = state["done"], state["epoch"], state.get("rates")
        for scheduler, saved in zip(self._schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)

    @property
    def _schedulers(self) -> list[LRScheduler]:
        return [*(scheduler for scheduler, _ in self._parts), *self._by_epoch]

    def take_given(self) -> None:
        """Puts the options that the job gives in place of those that optimizers got from a checkpoint.

        A rate keeps its share, to which the schedule has brought it. It is called after all states
        were loaded. Rates of a checkpoint that does not say what its job gave stay as they are.
        """
        share = self._share()
        for number, (optimizer, given) in enumerate(zip(self._optimizers, self._given, strict=True)):
            for name, group in _groups(optimizer):
                group.update({key: value for key, value in given[name].items() if key != "lr"})
                rate = given[name]["lr"]
                if self._saved is not None and self._saved[number].get(name) != rate:
                    group["lr"] = rate * share
                    group["initial_lr"] = rate
        for scheduler in self._schedulers:  # because a job that starts from another one may have other tables
            scheduler.base_lrs = [group["initial_lr"] for group in scheduler.optimizer.param_groups]

    def _share(self) -> float:
        """Returns the share of the job's rates that the optimizers have; it is the same for all groups."""
        for optimizer, saved in zip(self._optimizers, self._saved or (), strict=False):
            for name, group in _groups(optimizer):
                if saved.get(name):
                    return float(group["lr"]) / saved[name]
        return 1.0


def _groups(optimizer: Optimizer) -> list[tuple[str, dict[str, Any]]]:
    """Returns the parameter groups by the name of their table, or by their number."""
    return [(group.get("name", str(number)), group) for number, group in enumerate(optimizer.param_groups)]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


@contextmanager
def _no_warning_of_order() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        yield


def _warmup(optimizer: Optimizer, steps: int) -> _Part:
    return LinearLR(optimizer, start_factor=1 / steps, total_iters=steps - 1), steps - 1


def _main(optimizer: Optimizer, schedule: ScheduleConfig) -> _Part:
    if isinstance(schedule, StepSchedule):
        assert schedule.every_steps is not None
        return StepLR(optimizer, schedule.every_steps, schedule.factor), None
    if isinstance(schedule, CosineSchedule):
        return CosineAnnealingLR(optimizer, schedule.total_steps), schedule.total_steps
    assert isinstance(schedule, LinearSchedule)
    scheduler = LinearLR(
        optimizer, start_factor=1.0, end_factor=schedule.final_factor, total_iters=schedule.total_steps
    )
    return scheduler, schedule.total_steps
