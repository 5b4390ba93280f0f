"""Decides whether a prefetch pulls the rows of batches ahead, or steps aside and leaves them to the forward.

    ahead ── a block of steps ──> aside ── a block of steps ──> the faster way, until the next trial

Pulling ahead hides the wait for the shards. It costs hand-overs between threads, and rows that a step before changes
are asked for again. Where steps are short and most rows change, it costs more than it hides. So both ways are tried in
turns and the faster one is kept. Exact rows are the same either way; others are at most as old as they would be.
Where nearly all rows are left to their step, pulling ahead hides nothing, and its block ends after a few batches.
"""

from __future__ import annotations

import statistics
import weakref
from collections import deque
from collections.abc import Hashable
from typing import Any

_BLOCK = 12  # steps whose median stands for a way
_FIRST_PERIOD = 64  # steps until the next trial; each trial in vain doubles them
_LONGEST_PERIOD = 8192
_MOST_LEFT = 0.75  # share of a batch's rows that are left to its step, above which pulling ahead is in vain
_LOOKS_FROM = 3  # batches in a row that are ahead, of which the last one is judged by that share


class AheadOrAside:
    """The way of one loop's batches. The training thread notes each step; the dedup thread reads ``is_ahead``.

    Args:
        depth: the most batches that are ahead of the training loop. So many steps after a change of the way, and two
            more, belong to neither way.

    Attributes:
        is_ahead: whether rows of later batches are to be pulled ahead.
    """

    def __init__(self, depth: int) -> None:
        self.is_ahead = True
        self._settling = depth + 2
        self._recent: deque[float] = deque(maxlen=_BLOCK)
        self._left, self._period = _BLOCK, _FIRST_PERIOD
        self._before: float | None = None  # seconds of a step of the other way, during a trial
        self._began: float | None = None
        self._run = 0  # batches in a row that came the present way

    def begin(self) -> None:
        """Is called when a pass begins: its first steps are not measured."""
        self._began, self._run = None, 0

    def note(self, is_ahead: bool, now: float) -> None:
        """Is called when the training loop takes a batch.

        Args:
            is_ahead: whether the rows of this batch were to be pulled ahead.
            now: the time, in seconds.
        """
        began, self._began = self._began, now
        self._run = self._run + 1 if is_ahead == self.is_ahead else 0
        if began is None or self._run <= self._settling:
            return
        self._recent.append(now - began)
        self._left -= 1
        if self._left > 0:
            return
        seconds, before = statistics.median(self._recent), self._before
        self._recent.clear()
        if before is None:
            self._before, self._left = seconds, _BLOCK
            self._change()
            return
        is_slower = seconds >= before
        self._decide(changes=is_slower, is_in_vain=is_slower)

    def note_left(self, share: float) -> None:
        """Is called after a batch that was pulled ahead was handed to its step.

        Args:
            share: how much of its rows was left to the step, which had to pull them; from 0 to 1.
        """
        if not self.is_ahead or self._run < _LOOKS_FROM or share <= _MOST_LEFT:
            return
        self._decide(changes=True, is_in_vain=self._before is not None)

    def _decide(self, *, changes: bool, is_in_vain: bool) -> None:
        """Keeps or changes the way until the next trial, which is later after a trial in vain."""
        self._period = min(2 * self._period, _LONGEST_PERIOD) if is_in_vain else _FIRST_PERIOD
        self._before, self._left = None, self._period
        self._recent.clear()
        if changes:
            self._change()

    def _change(self) -> None:
        self.is_ahead, self._run = not self.is_ahead, 0


# A loop may make a prefetch for each epoch, and goes on with what the one before has found.
_paces: weakref.WeakKeyDictionary[Any, dict[Hashable, AheadOrAside]] = weakref.WeakKeyDictionary()


def pace_of(session: Any, options: tuple[int, bool, bool]) -> AheadOrAside:
    """Returns the pace of a session's loops with these options.

    Args:
        session: the session.
        options: the depth of the prefetch, whether it is exact, and whether the loop makes gradients.
    """
    return _paces.setdefault(session, {}).setdefault(options, AheadOrAside(options[0]))
