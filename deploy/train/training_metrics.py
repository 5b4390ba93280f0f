"""The Prometheus metrics of a worker of a training job: its progress, and the counters of its session."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...worker.training.training_report import EpochResult, EvaluationPoint, Observer

if TYPE_CHECKING:
    from ...worker.data.batch import TimeRange
    from ...worker.session.session_metrics import SessionMetrics


class TrainingMetrics(Collector):
    """An observer that keeps the last reported values for Prometheus, and forwards every report to another observer.

    Args:
        rank: the rank of the worker.
        observer: the observer that receives every report as well.

    Attributes:
        session: the metrics of the job's session; None while there is no session.
    """

    def __init__(self, rank: int, observer: Observer) -> None:
        self._rank, self._observer = str(rank), observer
        self._epoch, self._samples = 1, 0
        self._loss: float | None = None
        self._auc: float | None = None
        self._test_auc: float | None = None
        self.session: SessionMetrics | None = None

    def batch(self, *, epoch: int, done: float | None, samples: int, loss: float, auc: float) -> None:
        """Keeps and forwards the progress; see :class:`Observer`."""
        self._epoch, self._samples, self._loss, self._auc = epoch, samples, loss, auc
        self._observer.batch(epoch=epoch, done=done, samples=samples, loss=loss, auc=auc)

    def goes_on(self, results: Sequence[EpochResult]) -> None:
        """Forwards the results of the epochs before; see :class:`Observer`."""
        self._observer.goes_on(results)

    def window(self, epoch: int, samples: int, metrics: Mapping[str, float], times: TimeRange | None = None) -> None:
        """Forwards the metrics of a window; see :class:`Observer`."""
        self._observer.window(epoch, samples, metrics, times)

    def evaluating(self, epoch: int) -> None:
        """Forwards the start of an evaluation; see :class:`Observer`."""
        self._observer.evaluating(epoch)

    def point(self, result: EvaluationPoint) -> None:
        """Keeps and forwards the result of a test within an epoch; see :class:`Observer`."""
        self._test_auc = result.test_auc
        self._observer.point(result)

    def epoch(self, result: EpochResult) -> None:
        """Keeps and forwards the result of an epoch; see :class:`Observer`."""
        self._test_auc = result.test_auc
        self._observer.epoch(result)

    def collect(self) -> Iterator[Metric]:
        """Yields the values of all metrics at this moment; a metric without a value yet has no sample."""
        for name, sentence, value in (
            ("epoch", "Epoch that is being trained, from 1 (number).", self._epoch),
            ("samples", "Samples of this epoch so far, of all workers (count).", self._samples),
            ("loss", "Mean loss of the last batches of this worker (nats).", self._loss),
            ("auc", "AUC of the last batches of this worker (0 to 1).", self._auc),
            ("test_auc", "AUC on the test files in the last test (0 to 1).", self._test_auc),
        ):
            family = GaugeMetricFamily(f"sparserow_train_{name}", sentence, labels=["rank"])
            if value is not None:
                family.add_metric([self._rank], value)
            yield family
        if self.session is not None:
            yield from self.session.collect()
