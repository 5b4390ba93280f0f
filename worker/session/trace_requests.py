"""Requests to trace the forwards of a session's models, such as those of a prefetch that learns its ids."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class TracedForwards(Generic[T]):
    """The traces of forwards for one requester, which must keep this object alive as long as it wants traces.

    Attributes:
        traced: what was traced of all lookups so far.
    """

    def __init__(self) -> None:
        self.traced: list[T] = []


class TraceRequests(Generic[T]):
    """The pending requests; only the training thread uses them.

    Attributes:
        pending: what wants traces; one that nothing keeps alive is not there.
    """

    def __init__(self) -> None:
        self.pending: weakref.WeakSet[TracedForwards[T]] = weakref.WeakSet()

    def add(self) -> TracedForwards[T]:
        """Requests that forwards are traced as long as the returned object lives."""
        forwards: TracedForwards[T] = TracedForwards()
        self.pending.add(forwards)
        return forwards

    @property
    def is_any(self) -> bool:
        """Whether there is a request, so that the next forward must be traced."""
        return len(self.pending) > 0

    def record(self, traced: Sequence[T]) -> None:
        """Adds what was traced of a forward to every request."""
        for forwards in self.pending:
            forwards.traced.extend(traced)
