"""Records what the workers of a run trained on and measured in each epoch, also before a restart.

The module does no I/O.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ....proto.errors import not_allowed

MOST_EPOCHS = 1_000  # kept epochs of a job, the newest: the state is written with each lease
_MOST_SAMPLES = 1 << 53  # exact in JSON


@dataclass(frozen=True)
class Sums:
    """The sums over the workers of a run in one epoch.

    Attributes:
        samples: the number of samples that were trained on.
        measured: the number of these samples whose loss is in ``loss_sum``.
        loss_sum: the sum of losses.
        seconds: the sum of the workers' times.
    """

    samples: int = 0
    measured: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0

    def check(self) -> None:
        """Raises InvalidArgument for values that no worker can measure."""
        for name in ("samples", "measured"):
            if not 0 <= getattr(self, name) < _MOST_SAMPLES:
                raise not_allowed(f"trained.{name}", getattr(self, name), "[0, 2^53)")
        if not math.isfinite(self.loss_sum):
            raise not_allowed("trained.loss_sum", self.loss_sum, "a finite number")
        if not (math.isfinite(self.seconds) and self.seconds >= 0):
            raise not_allowed("trained.seconds", self.seconds, "a finite number >= 0")

    def plus(self, other: Sums) -> Sums:
        """Returns the sums of both."""
        return Sums(
            self.samples + other.samples,
            self.measured + other.measured,
            self.loss_sum + other.loss_sum,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True)
class EpochTest:
    """The evaluation of an epoch by one worker; ``auc`` and ``log_loss`` may be NaN."""

    samples_per_sec: float
    auc: float
    log_loss: float


@dataclass(frozen=True)
class EpochRecord:
    """The record of one epoch; ``tested`` is None until a worker has evaluated it."""

    trained: Sums = field(default_factory=Sums)
    tested: EpochTest | None = None


class EpochRecords:
    """The records of the epochs of one run, by number."""

    def __init__(self) -> None:
        self._epochs: dict[int, EpochRecord] = {}

    def __len__(self) -> int:
        return len(self._epochs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EpochRecords) and self.to_document() == other.to_document()

    def get(self, epoch: int) -> EpochRecord | None:
        """Returns the record of an epoch; None when no worker has reported on it."""
        return self._epochs.get(epoch)

    def train(self, epoch: int, trained: Sums) -> None:
        """Adds the sums of a worker to an epoch."""
        record = self._epochs.get(epoch, EpochRecord())
        self._put(epoch, EpochRecord(record.trained.plus(trained), record.tested))

    def test(self, epoch: int, tested: EpochTest) -> None:
        """Keeps the first evaluation of an epoch; an evaluation of an epoch without samples does not count."""
        record = self._epochs.get(epoch)
        if record is not None and record.tested is None:
            self._put(epoch, EpochRecord(record.trained, tested))

    def _put(self, epoch: int, record: EpochRecord) -> None:
        self._epochs[epoch] = record
        if len(self._epochs) > MOST_EPOCHS:
            del self._epochs[min(self._epochs)]

    def to_document(self) -> list[list[Any]]:
        """Returns the saved form: plain values for JSON, which has no NaN."""
        return [
            [epoch, *vars(record.trained).values(), None if record.tested is None else _without_nan(record.tested)]
            for epoch, record in sorted(self._epochs.items())
        ]

    @staticmethod
    def of_document(saved: list[list[Any]]) -> EpochRecords:
        """Returns the records of a saved form."""
        records = EpochRecords()
        for epoch, *trained, tested in saved:
            test = None if tested is None else EpochTest(*(math.nan if value is None else value for value in tested))
            records._epochs[epoch] = EpochRecord(Sums(*trained), test)
        return records


def _without_nan(tested: EpochTest) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in vars(tested).values()]
