"""``prefetch``: yields the batches of a loader, each with its rows already in this process when its step begins.

A pass has three threads. *load* asks the loader for batches. *dedup* reduces the ids of a batch to unique keys by
shard. *pull* asks the shards for their rows, and sends batch and rows to the device. The training thread takes a batch
and hands its rows to the session's step, where lookups find them. When exact, it first asks again for rows that have
changed. Where that costs more than it hides, the threads only load (``ahead_or_aside.py``).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch

from ...cpp_ext import _client
from ...cpp_ext.device.link import link_of
from ...proto.errors import FailedPrecondition, InvalidArgument, not_allowed
from ..session.session import Session
from ..session.tensor_group import leads
from ..session.tracing import Trace
from .ahead_or_aside import AheadOrAside, pace_of
from .device_batches import DeviceBatches, SentBatch
from .id_plan import Guess, IdPlan, IdsOf, LearntIds, NamedIds, NoIds
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
    on_host: Callable[[Any], Sequence[torch.Tensor]] | None = None,
    hints: int = 0,
    always: bool = False,
) -> Prefetch[Batch]:
    """Yields the loader's batches; background threads load them and pull their rows ahead of the training loop.

    The first batch shows which of its tensors reach which lookup, and later batches are pulled accordingly. Results
    never depend on this: a lookup that finds rows missing pulls them itself (``session.stats().lookups_missed``).

    Args:
        loader: any iterable of batches: tensors nested in tuples, lists, mappings, dataclasses or keyed jagged tensors.
            A background thread iterates it. It must not change a batch that it has yielded.
        session: the session over which the model was distributed.
        depth: the most batches that are ahead of the training loop; it bounds the memory.
        exact: True: rows are bit-identical to those of a pull at their step, and rows that changed since they were
            pulled are sent again. False: a pull may see ``depth`` steps fewer, within the session's staleness. None:
            True at staleness 0, else False.
        ids: a function that names the ids, in place of learning: batch -> {table: integer tensor, or a sequence of
            them}. None: the ids are learnt.
        device: the device to which batches are copied, each in one copy with the rows of its lookups; None leaves
            them where they are. The model's lookups must give their rows there: call ``model.to(device)``.
        on_host: a function that names the tensors of a batch that stay on the host: ids that only lookups use, say,
            which then need not cross. None: every tensor is copied.
        hints: the number of batches beyond ``depth`` that are loaded as well. Shards with an SSD get their keys, so
            that their rows are in memory when they are pulled. A late or wrong hint only costs reads.
        always: whether rows are pulled ahead even where that makes steps slower. False: both ways are tried in turns,
            and the faster one is kept (``session.stats().batches_aside``). With ``device`` or ``hints`` rows are always
            pulled ahead.

    Returns:
        An iterable; each ``iter()`` is one pass over the loader, with threads of its own. Its position can be saved and
        resumed when the loader's can: by ``state_dict``, like torchdata's stateful loaders.

    Raises:
        InvalidArgument: ``depth`` is not positive, or ``hints`` is negative. Or ``exact=False``, and the session's
            staleness is below ``depth``, or below the sum of ``depth`` and the row cache's staleness. Or ``exact=True``
            with a row cache. Or this machine has no such device.
        FailedPrecondition: the session is closed, or no model was distributed over it.
        Exception: while iterating, the error that the loader or a background thread raised, with its traceback; or
            ``ids`` names a table that the model does not have.
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
            raise not_allowed("prefetch.exact", False, "True at staleness 0")
        raise not_allowed("prefetch.depth", depth, f"1 to {staleness} at staleness {staleness}, or exact=True")
    cache = session.core.placement.cache
    if cache is not None and exact:
        raise not_allowed("prefetch.exact", True, "False for a session with a row cache")
    if cache is not None and staleness is not None and depth + cache.staleness > staleness:
        raise not_allowed(
            "prefetch.depth",
            depth,
            f"a sum with cache.staleness {cache.staleness} of at most {staleness}, the session's staleness",
        )
    session.core.native.check_usable()
    if not session.core.bound_tables():
        raise FailedPrecondition("prefetch: the session has no table yet; call distribute(model, session) first")
    plan: IdPlan = LearntIds(session.core.native, session.core.trace_requests, session.core.dense_ids)
    if not leads(session):
        plan = NoIds()  # the leader of the tensor group pulls
    elif ids is not None:
        plan = NamedIds(ids, session.namespace, frozenset(session.core.bound_tables()))
    there = None if device is None else torch.device(device)
    if on_host is not None and (there is None or there.type == "cpu"):
        raise not_allowed("prefetch.on_host", "a function", "None, as batches are not copied to a device")
    batches = None
    if there is not None and there.type != "cpu":
        try:
            link_of(there)
        except ValueError as error:
            raise InvalidArgument(f"prefetch.{error}") from None
        session.core.on_device.link(there)
        batches = DeviceBatches(there, session.core.on_device.stores, on_host)
    pace = None
    if not always and batches is None and hints == 0 and leads(session):
        pace = pace_of(session, (depth, exact, torch.is_grad_enabled()))
    return Prefetch(loader, session, _Settings(depth, exact, plan, batches, hints, pace))


@runtime_checkable
class StatefulLoader(Protocol):
    """A loader whose position can be saved and resumed, like torchdata's stateful loaders."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass
class _Progress:
    """The position of the training loop in the last pass.

    Attributes:
        taken: the loader's state after the batch that was taken last; None when the loader has no state.
        is_whole: whether the loader's present state is the position, because no pass has begun or the pass has ended.
        is_under_way: whether a pass has begun and was not closed.
    """

    taken: Any = None
    is_whole: bool = True
    is_under_way: bool = False

    def begin(self, state: Any) -> None:
        self.taken, self.is_whole, self.is_under_way = state, False, True


@dataclass(frozen=True)
class _Source:
    """One pass of the loader, with the loader when it can save its position."""

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
    device: DeviceBatches | None
    hints: int
    pace: AheadOrAside | None  # None: rows are always pulled ahead


@dataclass
class _Item:
    number: int  # the number of the batch in this pass, from 0
    host: Any  # the batch as the loader gave it
    position: Any  # the loader's state after this batch; None when the loader has no state
    rows: _client.PrefetchedBatch | None = None
    guess: Guess | None = None  # the ids that the rows are for, until they are packed for a device
    owner: Any = None  # keeps the tensors of the guess alive
    sent: SentBatch | None = None  # None: the batch stays where it is
    is_ahead: bool = True  # whether its rows were to be pulled ahead


class Prefetch(Generic[Batch]):
    """The batches of a loader, each with its rows pulled ahead; each ``iter()`` is one pass. :func:`prefetch` makes it.

    Args:
        loader: the loader.
        session: the session of the model.
        settings: the options of the prefetch.
    """

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
        """Returns the loader's state after the batch that the training loop took last.

        Batches that were loaded ahead are yielded again after a resume.

        Raises:
            FailedPrecondition: the loader has no ``state_dict``.
        """
        loader = self._check_stateful()
        return loader.state_dict() if self._progress.is_whole else self._progress.taken

    def goes_on_from(self, state: dict[str, Any] | None) -> bool:
        """Returns whether the state of this worker's loader is enough to go on, as :meth:`load_state_dict` needs it.

        It is for all loaders but those that know the positions of other workers, as readers of job files do.
        """
        answer = getattr(self._loader, "goes_on_from", None)
        return True if answer is None else bool(answer(state))

    def check_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Checks, without a change, what :meth:`load_state_dicts` would refuse.

        Raises:
            FailedPrecondition: the loader does not know the positions of other workers.
            Exception: the loader refuses the states.
        """
        self._shared("check_state_dicts")(states)

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Sets the position by the states of all workers of a loader that knows them; see ``goes_on_from``.

        Raises:
            FailedPrecondition: a pass is under way, or the loader does not know the positions of other workers.
            Exception: the loader refuses the states.
        """
        load = self._shared("load_state_dicts")
        self._check_between_passes("load_state_dicts")
        load(states)
        self._progress = _Progress()

    def _shared(self, method: str) -> Callable[[Sequence[dict[str, Any]]], None]:
        found: Callable[[Sequence[dict[str, Any]]], None] | None = getattr(self._loader, method, None)
        if found is None:
            kind = type(self._loader).__name__
            raise FailedPrecondition(f"prefetch: the loader ({kind}) cannot go on from the states of other workers")
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the position from which the next pass continues.

        Args:
            state: a result of :meth:`state_dict`.

        Raises:
            FailedPrecondition: the loader has no ``load_state_dict``, or a pass is under way.
            Exception: the loader refuses the state.
        """
        loader = self._check_stateful()
        self._check_between_passes("load_state_dict")
        loader.load_state_dict(state)
        self._progress = _Progress()

    def _check_between_passes(self, method: str) -> None:
        if self._progress.is_under_way:
            raise FailedPrecondition(f"prefetch.{method}: a pass is under way; close it, or load before iter()")

    def _check_stateful(self) -> StatefulLoader:
        if self._stateful is None:
            kind = type(self._loader).__name__
            raise FailedPrecondition(f"prefetch: the loader ({kind}) has no state_dict and load_state_dict")
        return self._stateful

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # TypeError when it has none, as list() expects


class PrefetchIterator(Generic[Batch]):
    """One pass over the loader. Leaving the loop early by ``break``, an error or Ctrl-C ends its threads."""

    def __init__(self, source: _Source, session: Session, native: _client.Prefetcher, settings: _Settings) -> None:
        self._session, self._native, self._settings = session, native, settings
        self._progress = source.progress
        self._progress.begin(source.state())
        self._work = _Work(session.core.native, native, settings, session.core.trace)
        stages = [("dedup", self._work.index), ("pull", self._work.pull)]
        if settings.hints:
            stages.insert(1, ("hint", self._work.hint))
        if settings.pace is not None:
            settings.pace.begin()
        self._pipeline = Pipeline(
            self._work.load(source), stages, depth=settings.depth, ahead=settings.hints, skips=self._work.skips
        )
        # Threads hold no reference to this object, so that they end when the training loop drops it.
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
            if self._settings.pace is not None:
                self._settings.pace.note(item.is_ahead, time.perf_counter())
                self._session.core.batches_aside += not item.is_ahead
            with self._session.core.trace.span("hand over", step=self._session.current_step):
                batch = self._hand_over(item)
        except BaseException:
            self.close()
            raise
        self._work.position = (item.number, self._session.current_step)
        self._progress.taken = item.position
        self._settings.plan.begin(batch)
        return batch

    def _hand_over(self, item: _Item) -> Batch:
        """Gives the batch's rows to the step; returns the batch as the training loop sees it."""
        sent, device = item.sent, self._settings.device
        pack = None if sent is None or sent.sent.pack is None else sent.sent.pack.native
        if item.rows is not None:
            rows = item.rows.rows
            left = self._native.hand_over(item.rows, with_gradient=torch.is_grad_enabled(), pack=pack)
            if self._settings.pace is not None:
                self._settings.pace.note_left(left / max(1, rows))
        batch: Batch = item.host
        if sent is not None and device is not None:
            batch = device.receive(sent, self._session.core.on_device)
        return batch

    def _take(self) -> _Item:
        was_open = self._finalizer.alive
        try:
            return self._pipeline.take()
        except StopIteration:
            self._progress.is_whole = self._progress.is_whole or was_open
            raise

    def close(self) -> None:
        """Ends the threads and waits for them, at most 5 seconds. Further calls do nothing."""
        self._finalizer()


def _end(plan: IdPlan, pipeline: Pipeline[_Item], progress: _Progress) -> None:
    progress.is_under_way = False
    plan.end()
    pipeline.close()


class _Work:
    """The work of the threads, a method for each stage. It shares only ``position`` with the iterator."""

    def __init__(
        self, session: _client.NativeSession, native: _client.Prefetcher, settings: _Settings, trace: Trace
    ) -> None:
        self._native, self._settings, self._trace = native, settings, trace
        # The number of the batch that was taken last, and its step. Before the first batch, -1 and the present step.
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
            is_ahead = self._settings.pace is None or self._settings.pace.is_ahead
            yield _Item(number, batch, position, is_ahead=is_ahead)
            number += 1

    @staticmethod
    def skips(item: _Item) -> bool:
        return not item.is_ahead

    def index(self, item: _Item) -> _Item:
        if not item.is_ahead:
            return item
        with self._trace.span("dedup", step=self._latest_step(item.number)):
            item.guess, item.owner = self._settings.plan.guess(item.number, item.host)
            if item.guess is not None:
                item.rows = self._native.index(*item.guess)
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
        if self._settings.device is not None:
            with self._trace.span("send", step=self._latest_step(item.number)):
                item.sent = self._settings.device.send(item.host, self._pack_of(item))
        item.guess = item.owner = None
        return item

    def _pack_of(self, item: _Item) -> _client.LookupPack | None:
        if item.rows is None or item.guess is None:
            return None
        pack, _ = self._native.pack(item.rows, *item.guess)
        return pack if pack.bytes else None

    def _latest_step(self, number: int) -> int:
        """Returns the latest step that can use batch ``number``, if each batch is used for at most one step."""
        taken, step = self.position
        return step + number - taken
