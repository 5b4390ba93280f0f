"""What the threads of a pass do: load a batch, dedup its ids, hint and pull their rows, and send both to the device."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ...cpp_ext import _client
from ..session.tracing import Trace
from .device_batches import DeviceBatches, SentBatch
from .id_plan import Guess, IdPlan
from .trials import AheadTrial, Trial


@runtime_checkable
class StatefulLoader(Protocol):
    """A loader whose position can be saved and resumed, like torchdata's stateful loaders."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass
class PassProgress:
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
        """Notes that a pass has begun, at a state of the loader."""
        self.taken, self.is_whole, self.is_under_way = state, False, True


@dataclass(frozen=True)
class PassSource:
    """One pass of the loader.

    Attributes:
        batches: the batches of the pass.
        stateful: the loader when it can save its position; else None.
        progress: the position of the training loop.
    """

    batches: Iterator[Any]
    stateful: StatefulLoader | None
    progress: PassProgress

    def state(self) -> Any:
        """Returns a copy of the loader's state; None when it has none."""
        return None if self.stateful is None else deepcopy(self.stateful.state_dict())


@dataclass(frozen=True)
class PrefetchSettings:
    """The options of a prefetch, as :func:`~.batches.prefetch` has checked them."""

    depth: int
    exact: bool
    plan: IdPlan
    device: DeviceBatches | None
    hints: int
    ahead_trial: AheadTrial | None  # None: rows are always pulled ahead
    hint_trial: Trial | None  # None: shards get hints of every batch, or of none


@dataclass
class PassItem:
    """A batch on its way through the threads of a pass."""

    number: int  # the number of the batch in this pass, from 0
    host: Any  # the batch as the loader gave it
    position: Any  # the loader's state after this batch; None when the loader has no state
    rows: _client.PrefetchedBatch | None = None
    guess: Guess | None = None  # the ids that the rows are for, until they are packed for a device
    owner: Any = None  # keeps the tensors of the guess alive
    sent: SentBatch | None = None  # None: the batch stays where it is
    is_ahead: bool = True  # whether its rows were to be pulled ahead
    is_hinted: bool = True  # whether shards with an SSD were to get its keys


class PassWork:
    """The work of the threads of a pass, a method for each stage.

    Args:
        session: the native half of the session.
        native: pulls the rows.
        settings: the options of the prefetch.
        trace: gets a span for each piece of work.

    Attributes:
        position: the number of the batch that the training loop took last, and its step; nothing else is shared with
            the training thread.
    """

    def __init__(
        self, session: _client.NativeSession, native: _client.Prefetcher, settings: PrefetchSettings, trace: Trace
    ) -> None:
        self._native, self._settings, self._trace = native, settings, trace
        # The number of the batch that was taken last, and its step. Before the first batch, -1 and the present step.
        self.position = (-1, session.step)

    def load(self, source: PassSource) -> Iterator[PassItem]:
        """Yields the batches of the loader."""
        number = 0
        while True:
            with self._trace.span("load", step=self._latest_step(number)):
                try:
                    batch = next(source.batches)
                except StopIteration:
                    return
                position = source.state()
            ahead, hints = self._settings.ahead_trial, self._settings.hint_trial
            yield PassItem(
                number,
                batch,
                position,
                is_ahead=ahead is None or ahead.is_on,
                is_hinted=hints is None or hints.is_on,
            )
            number += 1

    @staticmethod
    def skips(item: PassItem) -> bool:
        """Whether the stages after loading have nothing to do for a batch."""
        return not item.is_ahead

    def index(self, item: PassItem) -> PassItem:
        """Reduces the ids of a batch to unique keys by shard."""
        if not item.is_ahead:
            return item
        with self._trace.span("dedup", step=self._latest_step(item.number)):
            item.guess, item.owner = self._settings.plan.guess(item.number, item.host)
            if item.guess is not None:
                item.rows = self._native.index(*item.guess)
        return item

    def hint(self, item: PassItem) -> PassItem:
        """Sends the shards the keys that will be pulled."""
        if item.rows is not None and item.is_hinted:
            with self._trace.span("hint", step=self._latest_step(item.number)):
                self._native.hint(item.rows)
        return item

    def pull(self, item: PassItem) -> PassItem:
        """Pulls the rows of a batch, and sends batch and rows to the device where there is one."""
        if item.rows is not None:
            step = self._latest_step(item.number)
            with self._trace.span("prefetch", step=step):
                self._native.pull(item.rows, step)
        if self._settings.device is not None:
            with self._trace.span("send", step=self._latest_step(item.number)):
                item.sent = self._settings.device.send(item.host, self._pack_of(item))
        item.guess = item.owner = None
        return item

    def _pack_of(self, item: PassItem) -> _client.LookupPack | None:
        if item.rows is None or item.guess is None:
            return None
        pack, _ = self._native.pack(item.rows, *item.guess)
        return pack if pack.bytes else None

    def _latest_step(self, number: int) -> int:
        """Returns the latest step that can use batch ``number``, if each batch is used for at most one step."""
        taken, step = self.position
        return step + number - taken
