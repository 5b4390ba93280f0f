"""Sweeps the tables of a shard: removes the rows that their policies no longer keep."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ...cpp_ext import _server
from ...proto.errors import NotFound, SparserowError
from ...proto.schema import TableSchema
from .periodic_thread import PeriodicThread

log = logging.getLogger(__name__)

SWEEP_PAUSE_RATIO = 3.0  # a sweep takes at most a quarter of one core
MOST_DIFFERENCE_SEC = 3600.0  # between the clocks of shard and coordinator; beyond it one of them is wrong


class TableSweeps:
    """The sweeps of a shard, one at a time. Thread-safe.

    Args:
        store, server: the rows and the data plane of the shard.
        every_sec: the time between sweeps of the tables whose policy removes rows; None sweeps by command alone.

    Attributes:
        slot_share: the share of all slots that this shard owns, in [0, 1].
        clock_difference_sec: returns by how much this shard's clock is ahead of the coordinator's, in seconds. While
            that is more than an hour either way no row goes by its age in seconds: a clock that was set wrong would
            remove rows that are in use.
    """

    def __init__(self, store: _server.Store, server: _server.Server, every_sec: float | None) -> None:
        self._store, self._server = store, server
        self.slot_share = 1.0
        self.clock_difference_sec: Callable[[], float] = float
        self._trusts_clock = True  # guarded by _lock
        self._swept: set[int] = set()  # ids of the tables whose policy removes rows
        self._lock = threading.Lock()  # one sweep at a time
        self._thread = PeriodicThread(self.sweep_all, every_sec, name="sweeper")

    def add(self, schema: TableSchema) -> None:
        """Has a table swept periodically where its policy removes rows."""
        if schema.policy.sweeps:
            self._swept.add(schema.id)

    def remove(self, table_id: int) -> None:
        """Has a table swept no more; the call is harmless for a table that is not swept."""
        self._swept.discard(table_id)

    def sweep(self, table_id: int, *, dry_run: bool = False) -> _server.SweepReport:
        """Removes the rows that the table's policy no longer keeps, or counts them; blocks until that is done.

        Raises:
            NotFound: there is no such table.
        """
        with self._lock:
            report = self._store.sweep(
                table_id,
                dry_run=dry_run,
                share=self.slot_share,
                pause_ratio=SWEEP_PAUSE_RATIO,
                by_seconds=self._check_clock(),
            )
        if not dry_run and any(freed.rows for freed in report.freed):
            self._server.count_write(table_id)
        return report

    def _check_clock(self) -> bool:
        """Returns whether the clocks agree, and logs a change."""
        ahead_sec = self.clock_difference_sec()
        agrees = abs(ahead_sec) <= MOST_DIFFERENCE_SEC
        if self._trusts_clock and not agrees:
            side = "ahead of" if ahead_sec > 0 else "behind"
            log.warning(
                "the clock of this shard is %.1f h %s the coordinator's: the sweeps by seconds rest until they agree",
                abs(ahead_sec) / 3600,
                side,
            )
        elif agrees and not self._trusts_clock:
            log.info("the clock of this shard agrees with the coordinator's: sweeps go by seconds again")
        self._trusts_clock = agrees
        return agrees

    def sweep_all(self) -> None:
        """Sweeps every table whose policy removes rows."""
        for table_id in sorted(self._swept):
            try:
                self.sweep(table_id)
            except NotFound:
                continue  # dropped meanwhile
            except SparserowError as error:
                log.warning("table %d was not swept: %s", table_id, error)

    def stop(self) -> None:
        """Ends the periodic sweeps after the one under way."""
        self._thread.stop()
