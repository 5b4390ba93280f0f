"""Decides by trials whether batches take a way that costs work and may save waiting.

    on ── a block of steps ──> off ── a block of steps ──> the faster way, until the next trial

There are two such ways. Pulling ahead hides the wait for the shards. It costs hand-overs between threads, and rows that
a step before changes are asked for again. Hints hide reads of a shard's SSD. They cost its CPUs a second look at each
key, and rows that leave the memory before their use. Where steps are short, or CPUs are what is short, a way may cost
more than it hides. So it is tried in turns with its absence, and the faster one is kept. Exact rows are the same either
way; others are at most as old as they would be.
"""

from __future__ import annotations

import statistics
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

_BLOCK = 12  # steps whose median stands for a way
_FIRST_PERIOD = 64  # steps until the next trial; each trial in vain doubles them
_LONGEST_PERIOD = 8192
_LONGEST_PERIOD_OF_HINTS = 1024  # as the system's cache may lose a shard's files at any time
_MOST_LEFT = 0.75  # share of a batch's rows that are left to its step, above which pulling ahead is in vain
_LOOKS_FROM = 3  # batches in a row that are ahead, of which the last one is judged by that share


class Trial:
    """The way of one loop's batches. The training thread notes each step; the loading thread reads ``is_on``.

    Args:
        ahead: the most batches that are ahead of the training loop. So many steps after a change of the way, and two
            more, belong to neither way.
        longest_period: the most steps between two trials.

    Attributes:
        is_on: whether later batches are to take the way.
    """

    def __init__(self, ahead: int, longest_period: int = _LONGEST_PERIOD) -> None:
        self.is_on = True
        self._settling, self._longest_period = ahead + 2, longest_period
        self._recent: deque[float] = deque(maxlen=_BLOCK)
        self._left, self._period = _BLOCK, _FIRST_PERIOD
        self._before: float | None = None  # seconds of a step of the other way, during a trial
        self._began: float | None = None
        self._run = 0  # batches in a row that came the present way

    def begin(self) -> None:
        """Is called when a pass begins: its first steps are not measured."""
        self._began, self._run = None, 0

    def note(self, was_on: bool, now: float) -> None:
        """Is called when the training loop takes a batch.

        Args:
            was_on: whether this batch took the way.
            now: the time, in seconds.
        """
        began, self._began = self._began, now
        self._run = self._run + 1 if was_on == self.is_on else 0
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

    def _decide(self, *, changes: bool, is_in_vain: bool) -> None:
        """Keeps or changes the way until the next trial, which is later after a trial in vain."""
        self._period = min(2 * self._period, self._longest_period) if is_in_vain else _FIRST_PERIOD
        self._before, self._left = None, self._period
        self._recent.clear()
        if changes:
            self._change()

    def _change(self) -> None:
        self.is_on, self._run = not self.is_on, 0


class AheadTrial(Trial):
    """The trial of pulling ahead. Where nearly all rows are left to their step, its block ends after a few batches."""

    def note_left(self, share: float) -> None:
        """Is called after a batch that was pulled ahead was handed to its step.

        Args:
            share: how much of its rows was left to the step, which had to pull them; from 0 to 1.
        """
        if not self.is_on or self._run < _LOOKS_FROM or share <= _MOST_LEFT:
            return
        self._decide(changes=True, is_in_vain=self._before is not None)


_Made = TypeVar("_Made", bound=Trial)

# A loop may make a prefetch for each epoch, and goes on with what the one before has found.
_trials: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def ahead_trial_of(session: Any, depth: int, *options: Hashable) -> AheadTrial:
    """Returns the trial of pulling ahead for a session's loops with these options.

    Args:
        session: the session.
        depth: the depth of the prefetch.
        options: whether it is exact, and whether the loop makes gradients.
    """
    return _trial_of(session, ("ahead", depth, *options), lambda: AheadTrial(depth))


def hint_trial_of(session: Any, depth: int, hints: int, *options: Hashable) -> Trial:
    """Returns the trial of hints for a session's loops with these options.

    Args:
        session: the session.
        depth: the depth of the prefetch.
        hints: the number of batches beyond it whose keys shards get.
        options: whether it is exact, and whether the loop makes gradients.
    """
    return _trial_of(session, ("hints", depth, hints, *options), lambda: Trial(depth + hints, _LONGEST_PERIOD_OF_HINTS))


def _trial_of(session: Any, options: Hashable, make: Callable[[], _Made]) -> _Made:
    of_session = _trials.setdefault(session, {})
    found: _Made = of_session.setdefault(options, make())
    return found
