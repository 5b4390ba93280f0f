"""The options of live sync: which cluster a version follows, how often, and which changes may wait."""

from __future__ import annotations

from dataclasses import dataclass

from ..proto.errors import InvalidArgument

_FRESHNESS_GOAL_SEC = 10.0  # as deploy/monitoring/alerts.yaml has it


@dataclass(frozen=True)
class ThresholdOptions:
    """The threshold above which a change is sent at once. Rows that have changed less wait.

    Args:
        updates: a row is sent when it was written this many times since it was last sent; 0: not counted.
        move: a row is sent when the L2 distance of its weights from those last sent exceeds this; 0: not measured.
        longest_sec: a row is sent when it has waited this long, in seconds.

    Raises:
        InvalidArgument: a value is out of range.
    """

    updates: int = 0
    move: float = 0.0
    longest_sec: float = 5.0

    def __post_init__(self) -> None:
        if not 0 <= self.updates < 2**32 or not 0 <= self.move < float("inf") or not 0.001 <= self.longest_sec <= 3600:
            raise InvalidArgument(
                f"live sync: {self.updates} updates, a move of {self.move}, {self.longest_sec} s; allowed: "
                "updates in [0, 2**32), move in [0, inf), seconds in [0.001, 3600]"
            )

    @property
    def is_on(self) -> bool:
        """Whether there is a threshold, so that rows may wait."""
        return self.updates > 0 or self.move > 0


NO_THRESHOLD = ThresholdOptions()


@dataclass(frozen=True)
class FollowOptions:
    """The options of live sync.

    Args:
        coordinator: ``HOST:PORT`` of the training cluster's coordinator.
        name: the name of this process, unique among the followers of the cluster; names of cursors begin with it.
        interval_sec: the shortest pause between two rounds over all slots, in seconds; several changes of a row
            meanwhile are sent once. After a round with much work the pause is longer, until 0.7 s have passed since
            the round began.
        retry_sec: the pause after a failure, in seconds.
        threshold: the threshold below which training shards keep changed rows back for a while.
    """

    coordinator: str
    name: str
    interval_sec: float = 0.1
    retry_sec: float = 0.5
    threshold: ThresholdOptions = NO_THRESHOLD

    @property
    def freshness_goal_sec(self) -> float:
        """What 99 of 100 changes should be served in, in seconds: 10, or twice what these options let them wait."""
        waits = self.interval_sec + (self.threshold.longest_sec if self.threshold.is_on else 0.0)
        return max(_FRESHNESS_GOAL_SEC, 2 * waits)
