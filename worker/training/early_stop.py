"""Decides when a job ends before its last epoch, as a metric has not become better for some tests."""

from __future__ import annotations

import math

from ...proto.config.metrics_config import StopConfig, is_better_higher
from ...proto.errors import InvalidArgument
from .training_report import Evaluated, why_undefined


def goodness(setting: str, metric: str, result: Evaluated) -> float:
    """Returns the value of a metric, or its negative where a lower one is better.

    Args:
        setting: the key of the job file that names the metric.
        metric: its name.
        result: the result of a test.

    Raises:
        InvalidArgument: the test has no such metric, or the test data give none.
    """
    if metric not in result.metrics:
        names = ", ".join(name for name in result.metrics if "[" not in name)
        raise InvalidArgument(f"{setting}: there is no metric {metric!r}; there are: {names}")
    reason = why_undefined(result.metrics, metric)
    if reason is not None:
        raise InvalidArgument(
            f"{setting}: {metric} is not defined, as {reason}; give other test files or another metric"
        )
    return result.metrics[metric] * (1 if is_better_higher(metric) else -1)


class EarlyStop:
    """A pure function of the results of the tests, so a resumed run decides as the one that it continues.

    Args:
        config: the section ``metrics.stop``; None: never.
    """

    def __init__(self, config: StopConfig | None) -> None:
        self._config = config
        self._best = math.nan
        self._since = 0

    @property
    def is_over(self) -> bool:
        """Whether the job ends now."""
        return self._config is not None and self._since >= self._config.after

    def add(self, result: Evaluated) -> None:
        """Adds the result of a test, after an epoch or within it.

        Raises:
            InvalidArgument: the test has no such metric.
        """
        if self._config is None:
            return
        value = goodness("metrics.stop.metric", self._config.metric, result)
        if math.isnan(self._best) or value > self._best + self._config.least_gain:
            self._best, self._since = value, 0
        else:
            self._since += 1
