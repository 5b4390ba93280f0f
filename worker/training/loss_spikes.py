"""Finds losses that jump (``train.spike``), after which a run goes back to a checkpoint and passes the data over."""

from __future__ import annotations

import math
from collections import deque

from ...proto.config.spike_config import SpikeConfig
from ...proto.errors import InvalidArgument
from .process_group import WorkerGroup


class LossSpikes:
    """Compares the mean loss of the last steps with that of a longer window, on the first worker.

    Args:
        config: the section ``train.spike``; None: nothing is looked for.
        group: this worker and its peers.

    Attributes:
        found: how often the run has gone back.
    """

    def __init__(self, config: SpikeConfig | None, group: WorkerGroup) -> None:
        self._config, self._group = config, group
        self._losses: deque[float] = deque(maxlen=None if config is None else config.window)
        self.found = 0

    @property
    def is_asked(self) -> bool:
        """Whether the job looks for jumps."""
        return self._config is not None

    @property
    def recent(self) -> int:
        """The number of last steps whose mean loss is compared."""
        return 1 if self._config is None else max(1, self._config.window // 10)

    def add(self, loss: float) -> None:
        """Adds the mean loss of a step that was taken."""
        if self._config is not None:
            self._losses.append(loss)

    @property
    def is_due(self) -> bool:
        """Whether the loss has jumped: on the first worker, by its own samples, once its window is full."""
        config, losses = self._config, list(self._losses)
        if config is None or not self._group.is_first or len(losses) < config.window:
            return False
        before, now = losses[: -self.recent], losses[-self.recent :]
        mean = math.fsum(before) / len(before)
        return math.fsum(now) / len(now) > config.factor * mean > 0

    def note(self) -> None:
        """Notes that the run goes back; the losses of the jump, and of the step that learnt of it, leave the window.

        Raises:
            InvalidArgument: it has done so as often as the job allows.
        """
        assert self._config is not None
        self.found += 1
        for _ in range(min(len(self._losses), self.recent + 1)):
            self._losses.pop()
        if self.found > self._config.most:
            raise InvalidArgument(
                f"train.spike: the loss has jumped {self.found} times to more than {self._config.factor:g} times its "
                f"mean; allowed: {self._config.most} (train.spike.most). Lower the learning rates"
            )
