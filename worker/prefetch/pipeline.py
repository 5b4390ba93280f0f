"""A pipeline of threads: each does one stage of the work on every item, in order, with a bound on items under way."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

_log = logging.getLogger(__name__)
Item = TypeVar("Item")

_CLOSE_SEC = 5.0


@dataclass(frozen=True)
class _Failure:
    error: BaseException


class _End:
    """The mark in a queue after which there are no more items."""


class Pipeline(Generic[Item]):
    """Daemon threads in a row: one that reads ``source``, and one for each of ``stages``.

    One thread calls ``take`` and ``close``.

    Invariants:
     1. Items come out in the order of the source.
     2. At most ``depth`` items have entered the last stage and were not taken.
     3. At most ``ahead`` more items have left the source.
     4. After an error or the end nothing more comes out.
     5. An item that skips the stages goes from the source to ``take``, unless items before it are in a stage.

    Args:
        source: yields the items; its ``next`` runs in the first thread.
        stages: (name, work) of each stage; the next stage gets the item that work returns.
        depth: see invariant 2; at least 1.
        ahead: see invariant 3; at least 0.
        skips: whether an item needs no stage; it runs in the first thread. None: every item needs them.
    """

    def __init__(
        self,
        source: Iterator[Item],
        stages: Sequence[tuple[str, Callable[[Item], Item]]],
        *,
        depth: int,
        ahead: int = 0,
        skips: Callable[[Item], bool] | None = None,
    ) -> None:
        self._skips = skips
        self._entered = 0  # items that the first thread gave to the stages
        self._left = 0  # of these, those that the last stage is done with
        self._permits = threading.Semaphore(depth + ahead)
        self._last_permits = threading.Semaphore(depth)
        self._queues: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(len(stages) + 1)]
        self._stopped = threading.Event()
        self._threads = [self._thread("load", self._load, source, self._queues[0])]
        for index, (name, work) in enumerate(stages):
            permits = self._last_permits if index == len(stages) - 1 else None
            self._threads.append(self._thread(name, self._work, work, permits, *self._queues[index : index + 2]))
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _thread(name: str, run: Callable[..., None], *args: Any) -> threading.Thread:
        return threading.Thread(target=run, args=args, name=f"sparserow-{name}", daemon=True)

    def take(self) -> Item:
        """Waits for the next item and returns it.

        Raises:
            StopIteration: there are no more items, or the pipeline was closed.
            BaseException: the error that the source or a stage raised, with its traceback.
        """
        if self._stopped.is_set():
            raise StopIteration
        item = self._queues[-1].get()
        if isinstance(item, _Failure):
            self.close()
            raise item.error
        if isinstance(item, _End):
            self.close()
            raise StopIteration
        self._permits.release()
        self._last_permits.release()
        taken: Item = item
        return taken

    def close(self) -> None:
        """Ends the threads and waits for them, at most 5 seconds. Further calls do nothing.

        A thread that is still inside the source or a call ends when that returns; the log names it.
        """
        self._stopped.set()
        self._permits.release()
        self._last_permits.release()
        for queue in self._queues:
            queue.put(_End())
        until = time.monotonic() + _CLOSE_SEC
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        late = [thread.name for thread in self._threads if thread.is_alive()]
        if late:
            _log.warning(
                "prefetch: still busy %.0f s after the end, and left to end by themselves: %s", _CLOSE_SEC, late
            )
        self._threads = []

    def _load(self, source: Iterator[Item], out: SimpleQueue[Any]) -> None:
        while True:
            self._permits.acquire()
            if self._stopped.is_set():
                return
            try:
                item = next(source)
                # The last stage puts an item out before it counts it, so the order is kept.
                if self._skips is not None and self._entered == self._left and self._skips(item):
                    self._last_permits.acquire()
                    self._queues[-1].put(item)
                    continue
                self._entered += 1
                out.put(item)
            except StopIteration:
                out.put(_End())
                return
            except BaseException as error:
                out.put(_Failure(error))
                return

    def _work(
        self,
        work: Callable[[Item], Item],
        permits: threading.Semaphore | None,
        items: SimpleQueue[Any],
        out: SimpleQueue[Any],
    ) -> None:
        while True:
            item = items.get()
            if permits is not None and not isinstance(item, _End | _Failure):
                permits.acquire()
            if self._stopped.is_set():
                return
            if isinstance(item, _End | _Failure):
                out.put(item)
                return
            try:
                out.put(work(item))
            except BaseException as error:
                out.put(_Failure(error))
                return
            if permits is not None:
                self._left += 1
