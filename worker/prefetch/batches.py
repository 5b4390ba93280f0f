"""``prefetch``: yields the batches of a loader, each with its rows already in this process when its step begins.

A pass has three threads. *load* asks the loader for batches. *dedup* reduces the ids of a batch to unique keys by
shard. *pull* asks the shards for their rows, and sends batch and rows to the device. The training thread takes a batch
and hands its rows to the session's step, where lookups find them. When exact, it first asks again for rows that have
changed. Where that costs more than it hides, the threads only load (``trials.py``).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch

from ...cpp_ext import _client
from ...cpp_ext.device.link import link_of
from ...proto.errors import FailedPrecondition, InvalidArgument, not_allowed
from ..session.session import JobSession
from .device_batches import DeviceBatches
from .id_plan import IdPlan, IdsOf, LearntIds, NamedIds, NoIds
from .pass_work import PassItem, PassProgress, PassSource, PassWork, PrefetchSettings, StatefulLoader
from .pipeline import Pipeline
from .trials import ahead_trial_of, hint_trial_of

Batch = TypeVar("Batch")


def prefetch(
    session: JobSession,
    loader: Iterable[Batch],
    depth: int = 2,
    *,
    ids: IdsOf | None = None,
    device: torch.device | str | None = None,
    on_host: Callable[[Any], Sequence[torch.Tensor]] | None = None,
    hints: int = 0,
    always: bool = False,
) -> Prefetch[Batch]:
    """Yields the loader's batches; background threads load them and pull their rows ahead of the training loop.

    The first batch shows which of its tensors reach which lookup, and later batches are pulled accordingly. Results
    never depend on this: a lookup that finds rows missing pulls them itself (``session.stats().lookups_missed``).
    Rows are bit-identical to those of a pull at their step: those that changed since they were pulled are sent again.
    With a row cache a pull may see ``depth`` steps fewer, within the session's staleness.

    Args:
        loader: any iterable of batches: tensors nested in tuples, lists, mappings, dataclasses or keyed jagged tensors.
            A background thread iterates it. It must not change a batch that it has yielded.
        depth: the most batches that are ahead of the training loop; it bounds the memory.
        ids: a function that names the ids, in place of learning: batch -> {table: integer tensor, or a sequence of
            them}. None: the ids are learnt.
        device: the device to which batches are copied, each in one copy with the rows of its lookups; None leaves
            them where they are. The model's lookups must give their rows there: call ``model.to(device)``.
        on_host: a function that names the tensors of a batch that stay on the host: ids that only lookups use, say,
            which then need not cross. None: every tensor is copied.
        hints: the number of batches beyond ``depth`` that are loaded as well. Shards with an SSD get their keys, so
            that their rows are in memory when they are pulled. A late or wrong hint only costs reads.
        always: whether rows are pulled ahead, and hints are sent, even where that makes steps slower. False: both ways
            are tried in turns, and the faster one is kept (``session.stats().batches_aside`` and
            ``batches_unhinted``). With ``device`` or ``hints`` rows are always pulled ahead.

    Returns:
        An iterable; each ``iter()`` is one pass over the loader, with threads of its own. Its position can be saved and
        resumed when the loader's can: by ``state_dict``, like torchdata's stateful loaders.

    Raises:
        InvalidArgument: ``depth`` is not positive, or ``hints`` is negative. Or
            there is a row cache, and the session's staleness is below the sum of ``depth`` and the cache's. Or this
            machine has no such device.
        FailedPrecondition: the session is closed, or no model was distributed over it.
        Exception: while iterating, the error that the loader or a background thread raised, with its traceback; or
            ``ids`` names a table that the model does not have.
    """
    staleness = session.core.placement.staleness
    if not isinstance(depth, int) or depth < 1:
        raise not_allowed("prefetch.depth", depth, ">= 1")
    if not isinstance(hints, int) or hints < 0:
        raise not_allowed("prefetch.hints", hints, ">= 0")
    cache = session.core.placement.cache
    exact = cache is None  # because a cache has rows of earlier steps, which nothing asks for again
    if cache is not None and staleness is not None and depth + cache.staleness > staleness:
        raise not_allowed(
            "prefetch.depth",
            depth,
            f"a sum with cache.staleness {cache.staleness} of at most {staleness}, the session's staleness",
        )
    session.core.native.check_usable()
    if not session.core.bound_tables():
        raise FailedPrecondition("prefetch: the session has no table yet; call session.distribute(model) first")
    plan: IdPlan = LearntIds(session.core.native, session.core.trace_requests, session.core.dense_ids)
    if not session.core.leads:
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
        batches = DeviceBatches(there, session.core.on_device, on_host)
    ahead_trial, hint_trial, options = None, None, (exact, torch.is_grad_enabled())
    if not always and hints > 0:
        hint_trial = hint_trial_of(session, depth, hints, *options)
    elif not always and batches is None and session.core.leads:
        ahead_trial = ahead_trial_of(session, depth, *options)
    return Prefetch(loader, session, PrefetchSettings(depth, exact, plan, batches, hints, ahead_trial, hint_trial))


class Prefetch(Generic[Batch]):
    """The batches of a loader, each with its rows pulled ahead; each ``iter()`` is one pass. :func:`prefetch` makes it.

    Args:
        loader: the loader.
        session: the session of the model.
        settings: the options of the prefetch.
    """

    def __init__(self, loader: Iterable[Batch], session: JobSession, settings: PrefetchSettings) -> None:
        self._loader, self._session, self._settings = loader, session, settings
        self._native = _client.Prefetcher(session.core.native, exact=settings.exact, threads=torch.get_num_threads())
        self._stateful = loader if isinstance(loader, StatefulLoader) else None
        self._progress = PassProgress()

    def __iter__(self) -> PrefetchIterator[Batch]:
        source = PassSource(iter(self._loader), self._stateful, PassProgress())
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
        self._progress = PassProgress()

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
        self._progress = PassProgress()

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

    def __init__(
        self, source: PassSource, session: JobSession, native: _client.Prefetcher, settings: PrefetchSettings
    ) -> None:
        self._session, self._native, self._settings = session, native, settings
        self._progress = source.progress
        self._progress.begin(source.state())
        self._work = PassWork(session.core.native, native, settings, session.core.trace)
        stages = [("dedup", self._work.index), ("pull", self._work.pull)]
        if settings.hints:
            stages.insert(1, ("hint", self._work.hint))
        for trial in (settings.ahead_trial, settings.hint_trial):
            if trial is not None:
                trial.begin()
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
            self._note_ways(item)
            with self._session.core.trace.span("hand over", step=self._session.current_step):
                batch = self._hand_over(item)
        except BaseException:
            self.close()
            raise
        self._work.position = (item.number, self._session.current_step)
        self._progress.taken = item.position
        self._settings.plan.begin(batch)
        return batch

    def _note_ways(self, item: PassItem) -> None:
        settings, core, now = self._settings, self._session.core, time.perf_counter()
        if settings.ahead_trial is not None:
            settings.ahead_trial.note(item.is_ahead, now)
            core.batches_aside += not item.is_ahead
        if settings.hint_trial is not None:
            settings.hint_trial.note(item.is_hinted, now)
            core.batches_unhinted += not item.is_hinted

    def _hand_over(self, item: PassItem) -> Batch:
        """Gives the batch's rows to the step; returns the batch as the training loop sees it."""
        sent, device = item.sent, self._settings.device
        pack = None if sent is None or sent.sent.pack is None else sent.sent.pack.native
        if item.rows is not None:
            rows = item.rows.rows
            left = self._native.hand_over(item.rows, with_gradient=torch.is_grad_enabled(), pack=pack)
            if self._settings.ahead_trial is not None:
                self._settings.ahead_trial.note_left(left / max(1, rows))
        batch: Batch = item.host
        if sent is not None and device is not None:
            batch = device.receive(sent)
        return batch

    def _take(self) -> PassItem:
        was_open = self._finalizer.alive
        try:
            return self._pipeline.take()
        except StopIteration:
            self._progress.is_whole = self._progress.is_whole or was_open
            raise

    def close(self) -> None:
        """Ends the threads and waits for them, at most 5 seconds. Further calls do nothing."""
        self._finalizer()


def _end(plan: IdPlan, pipeline: Pipeline[PassItem], progress: PassProgress) -> None:
    progress.is_under_way = False
    plan.end()
    pipeline.close()
