"""The counters of a served model, and their export to Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


def _counter(text: str) -> Any:
    return field(default=0, metadata={"text": text, "family": CounterMetricFamily})


def _gauge(text: str) -> Any:
    return field(default=0, metadata={"text": text, "family": GaugeMetricFamily})


@dataclass(frozen=True)
class ServedModelStats:
    """What a served model did since its version was loaded; counters begin at 0 with each version."""

    version: int = _gauge("Version of the model that is in use (number).")
    dense_version: int = _gauge("Dense weights in use, 0 for those of the program (number).")
    pulls: int = _counter("Round trips of lookups to the serving processes (count).")
    cache_hits: int = _counter("Rows that lookups took from the cache, by id where it is on a device (count).")
    cache_misses: int = _counter("Rows that lookups missed in the cache, by id where it is on a device (count).")
    cache_hit_age_seconds: float = _counter(
        "Time between the request of a cached row and its use, summed over hits; divided by the hits it is their mean "
        "staleness (seconds)."
    )


class HasStats(Protocol):
    """A model with counters.

    Attributes:
        name: the name of the model.
    """

    name: str

    def stats(self) -> ServedModelStats:
        """Returns the counters at this moment."""
        ...


class ServedModelMetrics(Collector):
    """A Prometheus collector of a served model's counters, which are read at each scrape.

    Register it with ``prometheus_client.REGISTRY.register(sr.ServedModelMetrics(model))``.

    Args:
        model: the served model; its name is the label of each metric.
    """

    def __init__(self, model: HasStats) -> None:
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics with their values at this moment."""
        stats = self._model.stats()
        for each in fields(stats):
            name, text = f"sparserow_inference_{each.name}", each.metadata["text"]
            family = each.metadata["family"](name, text, labels=["model"])
            family.add_metric([self._model.name], getattr(stats, each.name))
            yield family
