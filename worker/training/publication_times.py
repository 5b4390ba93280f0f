"""When the model of a run is published while the run goes on (``publish.every``)."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...proto.config.publish_config import PublishConfig
from .process_group import WorkerGroup

_MICROSECONDS = 1_000_000


class PublicationTimes:
    """Finds on the first worker whether a publication is due; all workers of a step learn it with the step.

    By event time, versions are due when the watermark passes multiples of ``publish.every``, so that a run which goes
    on publishes at the same times. The first multiple counts that the watermark passes in this run.

    Args:
        config: the section ``publish``.
        group: this worker and its peers.
        watermark: returns the time up to which the events of all workers are read, in microseconds; None: not known.
    """

    def __init__(self, config: PublishConfig, group: WorkerGroup, watermark: Callable[[], int | None]) -> None:
        self._config, self._group, self._watermark = config, group, watermark
        self._turn: int | None = None  # how many times publish.every the watermark was at the last publication
        self.restart()

    @property
    def is_asked(self) -> bool:
        """Whether the job publishes while it runs."""
        return self._config.every is not None

    def restart(self) -> None:
        """Begins to count anew, when a run begins or goes on after a publication."""
        self._since = time.monotonic()
        if self._turn is not None:
            self._turn = self._turn_of_now()

    @property
    def is_due(self) -> bool:
        """Whether this worker publishes after the next step: the first one alone, which finds it for all."""
        every = self._config.every
        if every is None or not self._group.is_first:
            return False
        gone = time.monotonic() - self._since
        if self._config.by == "clock":
            return gone >= every
        turn = self._turn_of_now()
        if turn is None or self._turn is None:
            self._turn = turn
            return False
        return turn > self._turn and gone >= self._config.least_pause

    def _turn_of_now(self) -> int | None:
        every, watermark = self._config.every, self._watermark()
        return None if every is None or watermark is None else int(watermark // (every * _MICROSECONDS))
