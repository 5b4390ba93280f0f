"""The rows on the devices of the ranks, as they take part in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from typing_extensions import override

from .device_side import DeviceSide
from .participant import SEALED, NoPart, Pending, Seal, Step
from .server_rows import text_of_bad_rows


class RowsOnRanks(NoPart):
    """Rows on the devices of the ranks.

    Args:
        tables: the tables.
    """

    def __init__(self, tables: DeviceSide) -> None:
        self._tables = tables

    @override
    def seal(self, step: Step) -> Seal:
        """Sums the gradients by key, and sends the sums to the ranks that have the rows; every rank calls it."""
        numbers = self._tables.seal(step.unscale, step.most_norm)
        with step.trace.span("exchange", step=step.number):
            self._tables.exchange({} if step.sparse is None else step.sparse.learning_rates())
        return Seal(pending=Pending(numbers, self._judge)) if numbers else self._judge([])

    def _judge(self, numbers: Sequence[float]) -> Seal:
        sealed = self._tables.judge(numbers)
        return SEALED if not sealed.rows else Seal(text_of_bad_rows(sealed.table, sealed.key, sealed.rows))

    @override
    def prepare(self, step: Step) -> None:
        """Computes what the step changes."""
        self._tables.prepare()

    @override
    def commit(self, step: Step) -> None:
        """Changes the rows."""
        self._tables.apply()

    @override
    def forget(self, step: Step, *, has_failed: bool) -> None:
        """Drops the gradients and what was prepared."""
        self._tables.forget()

    @override
    def stats(self) -> Mapping[str, int]:
        """Returns the counters of the tables."""
        return self._tables.stats()
