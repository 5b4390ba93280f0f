"""What a session asks of tables on the ranks' devices, which ``worker/device_tables`` implements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SealedRows:
    """The gradients of a step that are not finite.

    Attributes:
        rows: how many rows have NaN or Inf.
        table: the full name of the first table with such a row; "" where there is none.
        key: the key of that row.
    """

    rows: int = 0
    table: str = ""
    key: int = 0


class DeviceSide(Protocol):
    """Tables whose rows are on the devices of the ranks; ``worker/device_tables`` implements it.

    A step calls ``seal``, ``exchange``, ``judge``, ``prepare`` and, after the vote, ``apply``; ``forget`` ends it.
    """

    @property
    def names(self) -> Sequence[str]:
        """The names of the tables within the namespace."""
        ...

    @property
    def rows(self) -> int:
        """The number of rows of all tables, on all ranks."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Removes tables and their rows."""
        ...

    def seal(self, scale: float, clip_row_norm: float) -> Sequence[Tensor]:
        """Sums the gradients by key, multiplies the sums by ``scale`` and shortens rows to ``clip_row_norm``.

        Returns:
            Numbers on the device, () float32 each, by which ``judge`` judges the sums; none where it needs none.
        """
        ...

    def judge(self, numbers: Sequence[float]) -> SealedRows:
        """Returns which sums are not finite, by what ``seal`` has returned."""
        ...

    def exchange(self, rates: Mapping[str, float]) -> None:
        """Sends the sums to the ranks that have the rows, with the learning rate of each table.

        Every rank calls it, and an error is one of every rank.
        """
        ...

    def prepare(self) -> None:
        """Computes what the step changes. An error refuses the step."""
        ...

    def apply(self) -> None:
        """Changes the rows."""
        ...

    def forget(self) -> None:
        """Drops the step's gradients and what was prepared."""
        ...

    def drop_gradients(self) -> None:
        """Drops the gradients alone."""
        ...

    def stats(self) -> Mapping[str, int]:
        """Returns what these tables add to the counters of :class:`SessionStats`."""
        ...

    def close(self) -> None:
        """Ends the use of the tables."""
        ...
