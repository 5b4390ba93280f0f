"""Threads in a row, each doing one thing to every item, in order, with a bound on the items between them."""

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
    """No more items."""


class Pipeline(Generic[Item]):
    """``source`` and then ``stages``, a daemon thread each.

    Invariants: items come out in the order of the source; at most ``depth`` have entered the last stage and were not
    taken, and at most ``ahead`` more have left the source; after an error or the end nothing more comes out. ``take``
    and ``close`` belong to one thread.

    Args:
        source: its ``next`` runs in the first thread.
        stages: (name, work); what work returns goes on.
        depth: at least 1.
        ahead: at least 0.
    """

    def __init__(
        self,
        source: Iterator[Item],
        stages: Sequence[tuple[str, Callable[[Item], Item]]],
        *,
        depth: int,
        ahead: int = 0,
    ) -> None:
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
        """The next item; waits for it.

        Raises:
            StopIteration: there is none, or the pipeline was closed.
            BaseException: what the source or a stage raised, with its traceback.
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
        """Ends the threads and waits for them, 5 seconds at most; one that is still inside the source or a call ends
        when that returns, and is named in the log. Idempotent.
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
                out.put(next(source))
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
