"""``prefetch``: the batches of a loader, each with its rows already here when its step begins.

Three threads per pass: *load* asks the loader, *dedup* copies the batch to the device and makes its ids unique keys by
shard, *pull* asks the shards for their rows. The training thread takes a batch, hands its rows to the session's step
(asking again for those that changed, when exact), and its lookups find them there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch

from ...cpp_ext import _client
from ...proto.errors import FailedPrecondition, InvalidArgument, not_allowed
from ..session.session import Session
from ..session.tracing import Trace
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
    hints: int = 0,
) -> Prefetch[Batch]:
    """The loader's batches, loaded and their rows pulled ahead by background threads.

    The first batch shows which of its tensors reach which lookup; later ones are pulled by that. Results never depend
    on it: a lookup that finds rows missing pulls them itself (``session.stats().lookups_missed``).

    Args:
        loader: any iterable of batches: tensors nested in tuples, lists, mappings, dataclasses or keyed jagged tensors.
            Iterated in a background thread; it must not change a batch that it gave.
        session: of the model. Call after ``distribute``.
        depth: batches that are ahead of the training loop at most; bounds the memory.
        exact: True: rows are what a pull at their step would give, to the bit; those that changed since they were
            pulled are sent again. False: a pull may see ``depth`` steps fewer, within the session's staleness. None:
            True at staleness 0, else False.
        ids: names the ids in place of learning: batch -> {table: integer tensor, or a sequence of such}.
        device: where batches go; None leaves them where they are.
        hints: batches beyond ``depth`` that are loaded as well, and whose keys shards with an SSD are told, so that
            their rows are in memory when they are pulled. A hint that is late or wrong costs reads and nothing else.

    Returns:
        An iterable; each ``iter()`` is one pass over the loader, with threads of its own. Its position can be saved and
        resumed where the loader's can (``state_dict``, as torchdata's stateful loaders).

    Raises:
        InvalidArgument: depth is not positive or hints negative, or ``exact=False`` with a staleness below depth, or
            below the sum of depth and the row cache's; or ``exact`` with a row cache.
        FailedPrecondition: the session is closed, or no model was distributed over it.
        Exception: while iterating, what the loader or a background thread raised, with its traceback; by ``ids``, a
            table that the model does not have.
    """
    staleness = session.core.placement.staleness
    if not isinstance(depth, int) or depth < 1:
        raise not_allowed("prefetch.depth", depth, ">= 1")
    if not isinstance(hints, int) or hints < 0:
        raise not_allowed("prefetch.hints", hints, ">= 0")
    if exact is None:
        exact = staleness == 0
    if not exact and staleness is not None and staleness < depth:
        if staleness == 0:
            raise InvalidArgument("prefetch.exact: False is not allowed at staleness 0; allowed: True")
        raise InvalidArgument(
            f"prefetch.depth: {depth} is not allowed at staleness {staleness} with exact=False; allowed: 1 to "
            f"{staleness}, or exact=True"
        )
    cache = session.core.placement.cache
    if cache is not None and exact:
        raise InvalidArgument("prefetch.exact: True is not allowed for a session with a row cache; allowed: False")
    if cache is not None and staleness is not None and depth + cache.staleness > staleness:
        raise InvalidArgument(
            f"prefetch.depth: {depth} is not allowed at staleness {staleness} with cache.staleness {cache.staleness}; "
            f"allowed: their sum at most {staleness}"
        )
    session.core.native.check_usable()
    if not session.core.bound_tables():
        raise FailedPrecondition("prefetch: the session has no table yet; call distribute(model, session) first")
    plan: IdPlan = LearntIds(session.core.native, session.core.trace_requests)
    if ids is not None:
        plan = NamedIds(ids, session.namespace, frozenset(session.core.bound_tables()))
    copy = None if device is None else DeviceCopy(torch.device(device))
    return Prefetch(loader, session, _Settings(depth, exact, plan, copy, hints))


@runtime_checkable
class StatefulLoader(Protocol):
    """A loader whose position can be saved and resumed, as torchdata's."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass
class _Progress:
    """How far the training loop is in the last pass.

    Attributes:
        taken: the loader's state after the batch that was taken last.
        is_whole: the loader's own state is the one that counts: no pass has begun, or it has come to its end.
    """

    taken: Any = None
    is_whole: bool = True
    is_under_way: bool = False

    def begin(self, state: Any) -> None:
        self.taken, self.is_whole, self.is_under_way = state, False, True


@dataclass(frozen=True)
class _Source:
    """One pass of the loader, and the reader that knows its position."""

    batches: Iterator[Any]
    stateful: StatefulLoader | None
    progress: _Progress

    def state(self) -> Any:
        return None if self.stateful is None else deepcopy(self.stateful.state_dict())


@dataclass(frozen=True)
class _Settings:
    depth: int
    exact: bool
    plan: IdPlan
    copy: DeviceCopy | None
    hints: int


@dataclass
class _Item:
    number: int  # from 0 in this pass
    batch: Any
    host: Any  # the same on the host
    position: Any  # of the loader after this batch; None when it has none
    rows: _client.PrefetchedBatch | None = None
    ready: torch.cuda.Event | None = None


class Prefetch(Generic[Batch]):
    """What :func:`prefetch` returns."""

    def __init__(self, loader: Iterable[Batch], session: Session, settings: _Settings) -> None:
        self._loader, self._session, self._settings = loader, session, settings
        self._native = _client.Prefetcher(session.core.native, exact=settings.exact)
        self._stateful = loader if isinstance(loader, StatefulLoader) else None
        self._progress = _Progress()

    def __iter__(self) -> PrefetchIterator[Batch]:
        source = _Source(iter(self._loader), self._stateful, _Progress())
        batches: PrefetchIterator[Batch] = PrefetchIterator(source, self._session, self._native, self._settings)
        self._progress = source.progress
        return batches

    def state_dict(self) -> dict[str, Any]:
        """The loader's state after the batch that the training loop took last; those that were loaded ahead come again.

        Raises:
            FailedPrecondition: the loader has no ``state_dict``.
        """
        loader = self._check_stateful()
        return loader.state_dict() if self._progress.is_whole else self._progress.taken

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next pass continues where ``state`` says.

        Raises:
            FailedPrecondition: the loader has no ``load_state_dict``, or a pass is under way.
            Exception: what the loader says of the state.
        """
        loader = self._check_stateful()
        if self._progress.is_under_way:
            raise FailedPrecondition("prefetch.load_state_dict: a pass is under way; close it, or load before iter()")
        loader.load_state_dict(state)
        self._progress = _Progress()

    def _check_stateful(self) -> StatefulLoader:
        if self._stateful is None:
            kind = type(self._loader).__name__
            raise FailedPrecondition(f"prefetch: the loader ({kind}) has no state_dict and load_state_dict")
        return self._stateful

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # TypeError when it has none, as list() expects


class PrefetchIterator(Generic[Batch]):
    """One pass. Leaving it early, by ``break``, an error or Ctrl-C, ends its threads; so does ``close``."""

    def __init__(self, source: _Source, session: Session, native: _client.Prefetcher, settings: _Settings) -> None:
        self._session, self._native, self._settings = session, native, settings
        self._progress = source.progress
        self._progress.begin(source.state())
        self._work = _Work(session.core.native, native, settings, session.core.trace)
        stages = [("dedup", self._work.index), ("pull", self._work.pull)]
        if settings.hints:
            stages.insert(1, ("hint", self._work.hint))
        self._pipeline = Pipeline(self._work.load(source), stages, depth=settings.depth, ahead=settings.hints)
        # Threads hold no reference to this object, so that they end when the loop lets go of it.
        self._finalizer = weakref.finalize(self, _end, settings.plan, self._pipeline, self._progress)
        session.core.follow(self)

    def __iter__(self) -> PrefetchIterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._work.position[0] >= 0:
            self._settings.plan.end()
        try:
            with self._session.core.trace.span("wait for batch", step=self._session.current_step):
                item = self._take()
            if item.rows is not None:
                with self._session.core.trace.span("hand over", step=self._session.current_step):
                    self._native.hand_over(item.rows, with_gradient=torch.is_grad_enabled())
        except BaseException:
            self.close()
            raise
        self._work.position = (item.number, self._session.current_step)
        self._progress.taken = item.position
        if self._settings.copy is not None:
            self._settings.copy.wait(item.batch, item.ready)
        self._settings.plan.begin(item.batch)
        batch: Batch = item.batch
        return batch

    def _take(self) -> _Item:
        was_open = self._finalizer.alive
        try:
            return self._pipeline.take()
        except StopIteration:
            self._progress.is_whole = self._progress.is_whole or was_open
            raise

    def close(self) -> None:
        """Ends the threads, waiting 5 seconds at most. Idempotent."""
        self._finalizer()


def _end(plan: IdPlan, pipeline: Pipeline[_Item], progress: _Progress) -> None:
    progress.is_under_way = False
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

    def load(self, source: _Source) -> Iterator[_Item]:
        number = 0
        while True:
            with self._trace.span("load", step=self._latest_step(number)):
                try:
                    batch = next(source.batches)
                except StopIteration:
                    return
                position = source.state()
            yield _Item(number, batch, batch, position)
            number += 1

    def index(self, item: _Item) -> _Item:
        with self._trace.span("dedup", step=self._latest_step(item.number)):
            if self._settings.copy is not None:
                item.batch, item.ready = self._settings.copy.copy(item.host)
            guess, owner = self._settings.plan.guess(item.number, item.batch, item.host)
            if guess is not None:
                item.rows = self._native.index(*guess)
            del owner
        return item

    def hint(self, item: _Item) -> _Item:
        if item.rows is not None:
            with self._trace.span("hint", step=self._latest_step(item.number)):
                self._native.hint(item.rows)
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
