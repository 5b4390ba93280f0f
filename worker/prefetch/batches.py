"""``prefetch``: the batches of a loader, each with its rows already here when its step begins.

Three threads per pass: *load* asks the loader, *dedup* copies the batch to the device and makes its ids unique keys by
shard, *pull* asks the shards for their rows. The training thread takes a batch, hands its rows to the session's step
(asking again for those that changed, when exact), and its lookups find them there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ...cpp_ext import _client
from ...proto.errors import FailedPrecondition, InvalidArgument
from ..session import Session
from ..tracing import Trace
from .device_copy import DeviceCopy
from .id_plan import IdPlan, IdsOf, LearntIds, NamedIds
from .pipeline import Pipeline

Batch = TypeVar("Batch")


def prefetch(
    loader: Iterable[Batch],
    session: Session,
    depth: int = 2,
    *,
    exact: bool | None = None,
    ids: IdsOf | None = None,
    device: torch.device | str | None = None,
) -> Prefetch[Batch]:
    """The loader's batches, loaded and their rows pulled ahead by background threads.

    The first batch shows which of its tensors reach which lookup; later ones are pulled by that. Results never depend
    on it: a lookup that finds rows missing pulls them itself (``session.stats().lookups_missed``).

    Args:
        loader: any iterable of batches: tensors nested in tuples, lists, mappings or dataclasses. Iterated in a
            background thread; it must not change a batch that it gave.
        session: of the model. Call after ``distribute``.
        depth: batches that are ahead of the training loop at most; bounds the memory.
        exact: True: rows are what a pull at their step would give, to the bit; those that changed since they were
            pulled are sent again. False: a pull may see ``depth`` steps fewer, within the session's staleness. None:
            True at staleness 0, else False.
        ids: names the ids in place of learning: batch -> {table: integer tensor, or a sequence of such}.
        device: where batches go; None leaves them where they are.

    Returns:
        An iterable; each ``iter()`` is one pass over the loader, with threads of its own.

    Raises:
        InvalidArgument: depth is not positive, or ``exact=False`` with a staleness below depth, or below the sum of
            depth and the row cache's; or ``exact`` with a row cache.
        FailedPrecondition: the session is closed, or no model was distributed over it.
        Exception: while iterating, what the loader or a background thread raised, with its traceback; by ``ids``, a
            table that the model does not have.
    """
    staleness = session.placement.staleness
    if not isinstance(depth, int) or depth < 1:
        raise InvalidArgument(f"prefetch.depth: {depth!r} is not allowed; allowed: >= 1")
    if exact is None:
        exact = staleness == 0
    if not exact and staleness is not None and staleness < depth:
        if staleness == 0:
            raise InvalidArgument("prefetch.exact: False is not allowed at staleness 0; allowed: True")
        raise InvalidArgument(
            f"prefetch.depth: {depth} is not allowed at staleness {staleness} with exact=False; allowed: 1 to "
            f"{staleness}, or exact=True"
        )
    cache = session.placement.cache
    if cache is not None and exact:
        raise InvalidArgument("prefetch.exact: True is not allowed for a session with a row cache; allowed: False")
    if cache is not None and staleness is not None and depth + cache.staleness > staleness:
        raise InvalidArgument(
            f"prefetch.depth: {depth} is not allowed at staleness {staleness} with cache.staleness {cache.staleness}; "
            f"allowed: their sum at most {staleness}"
        )
    session.native.check_usable()
    if not session.bound_tables():
        raise FailedPrecondition("prefetch: the session has no table yet; call distribute(model, session) first")
    plan: IdPlan = LearntIds(session.native)
    if ids is not None:
        plan = NamedIds(ids, session.namespace, frozenset(session.bound_tables()))
    copy = None if device is None else DeviceCopy(torch.device(device))
    return Prefetch(loader, session, _Settings(depth, exact, plan, copy))


@dataclass(frozen=True)
class _Settings:
    depth: int
    exact: bool
    plan: IdPlan
    copy: DeviceCopy | None


@dataclass
class _Item:
    number: int  # from 0 in this pass
    batch: Any
    host: Any  # the same on the host
    rows: _client.PrefetchedBatch | None = None
    ready: torch.cuda.Event | None = None


class Prefetch(Generic[Batch]):
    """What :func:`prefetch` returns."""

    def __init__(self, loader: Iterable[Batch], session: Session, settings: _Settings) -> None:
        self._loader, self._session, self._settings = loader, session, settings
        self._native = _client.Prefetcher(session.native, exact=settings.exact)

    def __iter__(self) -> PrefetchIterator[Batch]:
        return PrefetchIterator(iter(self._loader), self._session, self._native, self._settings)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # TypeError when it has none, as list() expects


class PrefetchIterator(Generic[Batch]):
    """One pass. Leaving it early, by ``break``, an error or Ctrl-C, ends its threads; so does ``close``."""

    def __init__(
        self, source: Iterator[Batch], session: Session, native: _client.Prefetcher, settings: _Settings
    ) -> None:
        self._session, self._native, self._settings = session, native, settings
        self._work = _Work(session.native, native, settings, session.trace)
        self._pipeline = Pipeline(
            self._work.load(source), [("dedup", self._work.index), ("pull", self._work.pull)], depth=settings.depth
        )
        # Threads hold no reference to this object, so that they end when the loop lets go of it.
        self._finalizer = weakref.finalize(self, _end, settings.plan, self._pipeline)
        session.follow(self)

    def __iter__(self) -> PrefetchIterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._work.position[0] >= 0:
            self._settings.plan.end()
        try:
            with self._session.trace.span("wait for batch", step=self._session.current_step):
                item = self._pipeline.take()
            if item.rows is not None:
                with self._session.trace.span("hand over", step=self._session.current_step):
                    self._native.hand_over(item.rows)
        except BaseException:
            self.close()
            raise
        self._work.position = (item.number, self._session.current_step)
        if self._settings.copy is not None:
            self._settings.copy.wait(item.batch, item.ready)
        self._settings.plan.begin(item.batch)
        batch: Batch = item.batch
        return batch

    def close(self) -> None:
        """Ends the threads, waiting 5 seconds at most. Idempotent."""
        self._finalizer()


def _end(plan: IdPlan, pipeline: Pipeline[_Item]) -> None:
    plan.end()
    pipeline.close()


class _Work:
    """What the threads do. Shares nothing with the iterator but ``position``."""

    def __init__(
        self, session: _client.NativeSession, native: _client.Prefetcher, settings: _Settings, trace: Trace
    ) -> None:
        self._native, self._settings, self._trace = native, settings, trace
        # Number of the batch taken last, and its step; before the first, as if one had been taken already.
        self.position = (-1, session.step)

    def load(self, source: Iterator[Any]) -> Iterator[_Item]:
        number = 0
        while True:
            with self._trace.span("load", step=self._latest_step(number)):
                try:
                    batch = next(source)
                except StopIteration:
                    return
            yield _Item(number, batch, batch)
            number += 1

    def index(self, item: _Item) -> _Item:
        with self._trace.span("dedup", step=self._latest_step(item.number)):
            if self._settings.copy is not None:
                item.batch, item.ready = self._settings.copy.copy(item.host)
            guess, held = self._settings.plan.guess(item.number, item.batch, item.host)
            if guess is not None:
                item.rows = self._native.index(*guess)
            del held
        return item

    def pull(self, item: _Item) -> _Item:
        if item.rows is not None:
            step = self._latest_step(item.number)
            with self._trace.span("prefetch", step=step):
                self._native.pull(item.rows, step)
        return item

    def _latest_step(self, number: int) -> int:
        """The latest step that can use this batch, when no batch is used for more than one."""
        taken, step = self.position
        return step + number - taken
