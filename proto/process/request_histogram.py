"""A Prometheus histogram of how long the requests of a data plane took."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from prometheus_client.core import HistogramMetricFamily, Metric


def request_histogram(
    name: str,
    counted: Mapping[str, tuple[Sequence[int], float]],
    bounds_us: Sequence[int],
    labels: Mapping[str, str] | None = None,
) -> Metric:
    """Returns a histogram with one series for each kind of request.

    Args:
        name: the name of the metric.
        counted: by kind of request, the number of requests in each bucket and the sum of their times in seconds. There
            is one bucket more than there are bounds.
        bounds_us: the upper bounds of the buckets, in microseconds.
        labels: the labels of every sample, which stand before the label ``request``.
    """
    more = dict(labels or {})
    histogram = HistogramMetricFamily(
        name,
        "How long requests took in this process, from the header read to the reply handed to the socket (seconds).",
        labels=[*more, "request"],
    )
    bounds = [*(str(bound / 1e6) for bound in bounds_us), "+Inf"]
    for kind, (requests, seconds) in counted.items():
        buckets = list(zip(bounds, map(float, itertools.accumulate(requests)), strict=True))
        histogram.add_metric([*more.values(), kind], buckets, seconds)
    return histogram
