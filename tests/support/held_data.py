"""Members of a job who lease parts of its data and keep them, so that an epoch is not over before a test says so."""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType

from sparserow.proto.control import ControlClient
from sparserow.proto.errors import DeadlineExceeded, Unavailable
from sparserow.proto.worker_identity import WorkerIdentity

_FIRST_RANK = 100
_BEAT_SEC = 0.5


class HeldData:
    """Holds the first chunks of an epoch; the job has no clock, so nobody waits for these members' steps.

    Args:
        address: of the coordinator.
        job: its name, which is its namespace's as well.
        run: as the job's workers name it.
        chunks: that the epoch has.
        held: how many of them are kept until :meth:`release`.
        order: the digest of the samples' order, as the job's workers have it.
    """

    def __init__(self, address: str, *, job: str, run: str, chunks: int, held: int, order: int) -> None:
        self._control = ControlClient(address)
        self._job = job
        # A job begins when all its ranks are there: alone, that is at once. A worker of rank 0 takes the place over.
        self._register(0, 1)
        self._members = [self._register(_FIRST_RANK + index, _FIRST_RANK + held) for index in range(held)]
        for member in self._members:
            assert self._control.lease_data(
                member, run=run, epoch=1, epochs=1, chunks=chunks, done=[], step=0, order=order
            ).HasField("chunk")
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._beats = threading.Thread(target=self._beat)

    def __enter__(self) -> HeldData:
        self._beats.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._beats.join()
        self._control.close()

    def _register(self, rank: int, world_size: int) -> WorkerIdentity:
        return self._control.register_worker(
            namespace=self._job, job=self._job, rank=rank, world_size=world_size, staleness=None
        )

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_SEC):
            with (
                self._lock,
                contextlib.suppress(DeadlineExceeded, Unavailable),
            ):  # by the test
                for member in self._members:
                    self._control.heartbeat_worker(member, step=None)

    def release(self, count: int) -> None:
        """Lets others have ``count`` of the chunks that are still held."""
        with self._lock:
            for _ in range(count):
                self._control.deregister_worker(self._members.pop())

    def workers(self) -> dict[int, int]:
        """Epoch of registration by rank, of the workers that train."""
        jobs = [job for job in self._control.status().jobs if job.name == self._job]
        return {m.rank: m.epoch for job in jobs for m in job.members if m.rank < _FIRST_RANK and m.lease_left_sec}
