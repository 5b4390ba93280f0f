"""The rows on servers, as they take part in a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from typing_extensions import override

from ...cpp_ext import _client
from ...proto.errors import OutsideQuorum, SparserowError
from .background_push import BackgroundPush
from .commit_doubt import fenced_in_doubt
from .participant import SEALED, NoPart, Seal, Step


class ServerRows(NoPart):
    """The session's rows on servers.

    Args:
        native: the native half of the session.
        pushes: the thread that sends the last phase of the commit; None: :meth:`commit` sends it.
    """

    def __init__(self, native: _client.NativeSession, pushes: BackgroundPush | None) -> None:
        self._native, self._pushes = native, pushes
        self._is_outside = False

    @override
    def seal(self, step: Step) -> Seal:
        """Sums the gradients by key."""
        rows, bad_rows, table, key = self._native.seal(step.unscale, clip_row_norm=step.most_norm)
        if rows == 0 and step.note_empty is not None and not step.allow_empty:
            step.note_empty()
        return SEALED if not bad_rows else Seal(text_of_bad_rows(table, key, bad_rows))

    @override
    def prepare(self, step: Step) -> None:
        """Sends the gradients to the shards, where something else is committed with them."""
        if not step.is_shared and self._native.shard_count == 1 and self._pushes is None:
            return  # one frame decides all
        with self._outside_noted(), step.trace.span("push", step=step.number):
            self._native.prepare()

    @override
    def commit(self, step: Step) -> None:
        """Commits the rows; with a thread for that, the commit is decided and goes on behind."""
        if self._pushes is not None:
            self._pushes.send(step.trace)
        else:
            with self._outside_noted(), step.trace.span("push", step=step.number), fenced_in_doubt():
                if self._native.is_prepared:
                    self._native.commit_prepared()
                else:
                    self._native.commit()
        if step.sparse is not None:
            step.sparse.step_from_session()

    @contextmanager
    def _outside_noted(self) -> Iterator[None]:
        try:
            yield
        except OutsideQuorum:
            self._is_outside = True
            raise

    @override
    def abort(self, step: Step, *, is_skipped: bool) -> None:
        """Drops the commit; outside of the quorum the native half has done so, and the job's step is over."""
        if not self._is_outside:
            self._native.abort()
        elif step.sparse is not None:
            step.sparse.step_from_session()  # for schedulers

    @override
    def forget(self, step: Step, *, has_failed: bool) -> None:
        """Opens the session for the next step; gradients that a failed step has not sealed are dropped."""
        self._is_outside = False
        self._native.reopen()
        if has_failed and self._native.staged_calls > 0:
            with suppress(SparserowError):  # because the error that ends the step says more
                self._native.drop_gradients()

    @override
    def stats(self) -> Mapping[str, int]:
        """Returns the counters of the native half."""
        return self._native.stats()


def text_of_bad_rows(table: str, key: int, rows: int) -> str:
    """Returns which rows have a gradient that is not finite."""
    return f"table {table!r}: the gradient of key {key} is not finite ({rows} such rows)"
