"""What shards had acknowledged to workers that have left, until a checkpoint has it. The module does no I/O.

A worker that is there says what a shard lost that came back from an older checkpoint, as it sends again what it holds.
For one that has left the coordinator keeps how many commits each shard had of it; what the checkpoint lacks is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

MOST_COUNTS = 1 << 15  # of all workers and shards together, about 200 KB of the coordinator's state
UNKNOWN = -1


class DepartedWorker(NamedTuple):
    """A worker that has left.

    Attributes:
        namespace: the namespace of its job.
        job_id, worker_id, epoch: the worker.
        generation: the clock that its counts are of.
        mark: the number of the operation by which it left.
        counts: how many commits and writes by key each shard had of it; UNKNOWN where it is not known.
    """

    namespace: str
    job_id: int
    worker_id: int
    epoch: int
    generation: int
    mark: int
    counts: tuple[int, ...]


class DepartedWorkers:
    """The workers that have left since the newest checkpoint was cut. Not thread-safe.

    Attributes:
        forgotten: how many more there were, whose counts did not fit into ``MOST_COUNTS``.
    """

    def __init__(self) -> None:
        self._workers: list[DepartedWorker] = []
        self._counts = 0
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Any:
        return iter(self._workers)

    def add(self, worker: DepartedWorker) -> None:
        """Keeps a worker; beyond ``MOST_COUNTS`` the one that left first is forgotten."""
        self._workers.append(worker)
        self._counts += len(worker.counts)
        while self._counts > MOST_COUNTS:
            self._counts -= len(self._workers.pop(0).counts)
            self.forgotten += 1

    def saved(self, mark: int) -> None:
        """Forgets those that had left when the operation ``mark`` was the newest, at which a checkpoint was cut."""
        self._keep(lambda worker: worker.mark > mark)
        self.forgotten = 0

    def restored(self, namespace: str | None) -> None:
        """Forgets those of a namespace whose rows were set back; None: of all."""
        self._keep(lambda worker: namespace is not None and worker.namespace != namespace)
        if namespace is None:
            self.forgotten = 0

    def _keep(self, stays: Callable[[DepartedWorker], bool]) -> None:
        self._workers = [worker for worker in self._workers if stays(worker)]
        self._counts = sum(len(worker.counts) for worker in self._workers)

    def to_document(self) -> dict[str, Any]:
        """Returns the saved form for the coordinator's state."""
        return {"workers": [list(worker) for worker in self._workers], "forgotten": self.forgotten}

    @classmethod
    def of_document(cls, saved: dict[str, Any]) -> DepartedWorkers:
        """Returns the workers of a saved form."""
        made = cls()
        for namespace, job_id, worker_id, epoch, generation, mark, counts in saved["workers"]:
            made.add(DepartedWorker(namespace, job_id, worker_id, epoch, generation, mark, tuple(map(int, counts))))
        made.forgotten = int(saved["forgotten"])
        return made
