"""Writes a run down while it goes on: as JSON lines (``metrics.file``) and for TensorBoard (``metrics.tensorboard``).

``sparserow report`` draws the lines (run_report.py).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from ...proto.config.job import JobConfig
from ...proto.errors import FailedPrecondition
from ...proto.extras import install_command
from ...worker.training.training_report import EpochResult, EvaluationPoint, Observer

if TYPE_CHECKING:
    from ...worker.data.batch import TimeRange

_EVERY_SEC = 2.0


class RunLog:
    """An observer that writes every report down, and forwards it to another observer.

    Args:
        job: the job; ``metrics`` says where its run is written.
        observer: receives every report as well.

    Raises:
        FailedPrecondition: the file cannot be written, or a package is missing.
    """

    def __init__(self, job: JobConfig, observer: Observer) -> None:
        self._observer = observer
        self._file = _opened(job.metrics.file)
        self._board = _board(job.metrics.tensorboard)
        self._last_progress = 0.0
        self._before = 0  # samples of the epochs before
        self._write("run", job=job.name, epochs=job.train.epochs, seed=job.train.seed)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        if self._board is not None:
            self._board.close()

    def goes_on(self, results: Sequence[EpochResult]) -> None:
        """Writes the samples of the epochs before, by which later ones have their place; see :class:`Observer`."""
        self._before = sum(result.samples for result in results)
        self._write("resumed", epochs=[[result.epoch, result.samples] for result in results])
        self._observer.goes_on(results)

    def batch(self, *, epoch: int, done: float | None, samples: int, loss: float, auc: float) -> None:
        """Writes the progress, every two seconds; see :class:`Observer`."""
        now = time.monotonic()
        if now - self._last_progress >= _EVERY_SEC:
            self._last_progress = now
            self._write("progress", epoch=epoch, samples=samples, loss=loss, auc=auc)
            self._scalars("train", {"loss": loss, "auc": auc}, self._before + samples)
        self._observer.batch(epoch=epoch, done=done, samples=samples, loss=loss, auc=auc)

    def window(self, epoch: int, samples: int, metrics: Mapping[str, float], times: TimeRange | None = None) -> None:
        """Writes the metrics of a window; see :class:`Observer`."""
        extra = {} if times is None else {"times": [_iso(each) for each in times]}
        self._write("window", epoch=epoch, samples=samples, metrics=dict(metrics), **extra)
        self._scalars("progressive", metrics, self._before + samples)
        self._observer.window(epoch, samples, metrics, times)

    def evaluating(self, epoch: int) -> None:
        """Forwards the start of an evaluation."""
        self._observer.evaluating(epoch)

    def point(self, result: EvaluationPoint) -> None:
        """Writes the result of a test within an epoch; see :class:`Observer`."""
        self._write("test", **asdict(result))
        self._scalars("test", result.metrics, self._before + result.samples)
        self._observer.point(result)

    def epoch(self, result: EpochResult) -> None:
        """Writes the result of an epoch; see :class:`Observer`."""
        self._before += result.samples
        self._write("epoch", **asdict(result))
        self._scalars("test", result.metrics, self._before)
        figures = {"loss": result.train_loss, "samples_per_sec": result.samples_per_sec}
        self._scalars("epoch", figures, self._before)
        self._observer.epoch(result)

    def _write(self, kind: str, **values: Any) -> None:
        if self._file is not None:
            entry = {"kind": kind, "time": round(time.time(), 3), **values}
            self._file.write(json.dumps(_finite(entry)) + "\n")
            self._file.flush()

    def _scalars(self, group: str, values: Mapping[str, float], samples: int) -> None:
        if self._board is not None:
            for name, value in values.items():
                if math.isfinite(value):
                    self._board.add_scalar(f"{group}/{name}", value, samples)


def _iso(microseconds: int) -> str:
    """Returns a time as ISO 8601 in UTC, of whatever year."""
    return f"{np.datetime64(microseconds, 'us')}Z"


def _opened(path: str | None) -> IO[str] | None:
    if path is None:
        return None
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return Path(path).open("a", encoding="utf-8")
    except OSError as error:
        raise FailedPrecondition(f"metrics.file: {path} cannot be written: {error.strerror}") from error


def _board(folder: str | None) -> Any:
    if folder is None:
        return None
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise FailedPrecondition(
            f"metrics.tensorboard: needs tensorboardX; install it: {install_command('tensorboard')}"
        ) from error
    try:
        return SummaryWriter(folder)
    except OSError as error:
        raise FailedPrecondition(f"metrics.tensorboard: {folder} cannot be written: {error}") from error


def _finite(value: Any) -> Any:
    """Returns the value with null for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return value
