"""Decides which worker trains on which part of an epoch's data. The module does no I/O and is not thread-safe.

A pass over the data is cut into chunks, which all workers count alike. A worker leases one chunk after another. Each
batch is one commit, so the steps that a worker has committed say how far it is. When a worker leaves the job or dies,
the rest of its chunk goes to another worker.

Invariants:
 1. A chunk is leased to at most one member of the job.
 2. A chunk is done only when its worker said so as a member of the job; all its commits are acknowledged then.
 3. The lease of a worker that is gone ends with the operation that fences it, which knows its last step.
 4. An epoch is over when all its chunks are done; the next one begins with the first worker that asks for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ....proto.errors import FailedPrecondition, not_allowed
from .epoch_records import EpochRecord, EpochRecords, EpochTest, Sums
from .stream_leases import JobStream, is_of_stream
from .stream_requests import StreamAnswer, StreamRequest

WorkerKey = tuple[int, int]  # (worker id, epoch of its registration)

MOST_CHUNKS = 1 << 20
MOST_JOBS = 1_024  # ended jobs whose data is kept: a run may continue the next day
MOST_ENDED_EPOCHS = 2_000  # epochs of all ended jobs whose records are kept


@dataclass(frozen=True)
class DataLease:
    """A chunk that a worker trains on now.

    Attributes:
        holder: the worker that has the lease.
        step: the step with which the holder commits its first batch of the chunk.
        skip: the number of batches before that one, which the rows contain already.
    """

    holder: WorkerKey
    step: int
    skip: int


@dataclass(frozen=True)
class LeaseRequest:
    """A request of a worker.

    Attributes:
        run: the id of the run; a new run of the job begins at its first epoch.
        epoch: the number of the epoch, from 1.
        chunks: the number of chunks of an epoch, as this worker counts.
        done: the chunks that the worker has finished since its last request.
        step: the step of its next commit.
        epochs: the number of epochs of the run; 0 means as many as have begun.
        trained: the sums of what it trained on in ``done``; None when it does not report them.
        tested: the evaluation of the epoch's model; None when it has not evaluated it.
        again: whether its scheduler started it again, so that a run that is over stays over.
        order: the digest of the order of the epoch's samples, whose windows are the chunks.
    """

    run: str
    epoch: int
    chunks: int
    done: Collection[int]
    step: int
    epochs: int = 0
    trained: Sums | None = None
    tested: EpochTest | None = None
    again: bool = False
    order: int = 0


@dataclass(frozen=True)
class LeaseAnswer:
    """The answer to a worker: a chunk, or none when the epoch is over or other workers have the last chunks.

    In the last case the worker asks again.

    Attributes:
        chunk: the leased chunk; None when there is none.
        skip: the number of first batches of the chunk to leave out.
        is_over: whether the epoch is over.
        epoch: the epoch under way.
        record: the record of the epoch that is over; None when its workers reported none.
    """

    chunk: int | None = None
    skip: int = 0
    is_over: bool = False
    epoch: int = field(default=0, compare=False)
    record: EpochRecord | None = field(default=None, compare=False)


def _runs(chunks: Iterable[int]) -> list[tuple[int, int]]:
    """Returns (first, number) of each run of neighbours, ascending. There are few runs, because chunks are leased in
    order.
    """
    runs: list[tuple[int, int]] = []
    for chunk in sorted(chunks):
        if runs and sum(runs[-1]) == chunk:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((chunk, 1))
    return runs


def _of_runs(runs: Iterable[Sequence[int]]) -> set[int]:
    return {chunk for first, n in runs for chunk in range(first, first + n)}


@dataclass
class JobData:
    """The pass of one job over its data.

    Attributes:
        run: the id of the run; empty after a restore, until a run asks.
        generation: the generation of the job when it last asked.
        epoch: the number of the epoch, from 1.
        chunks: the number of chunks of the epoch.
        done: the finished chunks.
        leases: the chunks that workers train on now.
        skips: the number of batches that the rows contain already, of chunks without a holder; a chunk that is not
            listed has 0.
        records: the records of this epoch and the epochs before.
        order: the digest of the order of the epoch's samples.
    """

    run: str
    generation: int
    epoch: int
    chunks: int
    done: set[int] = field(default_factory=set)
    leases: dict[int, DataLease] = field(default_factory=dict)
    skips: dict[int, int] = field(default_factory=dict)
    records: EpochRecords = field(default_factory=EpochRecords)
    order: int = 0
    _first: int = field(default=0, compare=False)  # all chunks before it are done

    @property
    def is_over(self) -> bool:
        """Whether all chunks of the epoch are done."""
        return len(self.done) == self.chunks

    def goes_on(self, request: LeaseRequest) -> bool:
        """Whether workers with this request continue the pass, after all workers of the job had left.

        They do when they are of the same run, and the run was not at its end or a scheduler started them again.
        """
        return self.run == request.run and (request.again or not self._is_at_end(request.epochs))

    def _is_at_end(self, epochs: int) -> bool:
        """Whether the last epoch is over, and tested where workers report evaluations."""
        last = self.records.get(self.epoch)
        return self.is_over and self.epoch >= epochs and (last is None or last.tested is not None)

    def left(self, holder: WorkerKey, last_step: int) -> None:
        """Ends the leases of a worker that is gone; none of its later messages counts.

        Args:
            holder: the worker.
            last_step: the step of its last commit on any shard; -1 when there is none.
        """
        for chunk, lease in list(self.leases.items()):
            if lease.holder == holder:
                del self.leases[chunk]
                self._skip(chunk, lease, last_step)

    def _skip(self, chunk: int, lease: DataLease, last_step: int) -> None:
        batches = lease.skip + max(0, last_step + 1 - lease.step)
        if batches:
            self.skips[chunk] = batches

    def answer(self, request: LeaseRequest, holder: WorkerKey, known: Collection[WorkerKey]) -> LeaseAnswer:
        """Notes what a worker reports, and leases a chunk to it.

        Args:
            request: the request of the worker.
            holder: the worker that asks.
            known: the members of the job, and those whose end the shards do not know yet.

        Raises:
            FailedPrecondition: the worker counts other chunks than the other workers, or begins an epoch before the
                last is over.
        """
        if request.tested is not None and (
            request.epoch < self.epoch or (request.epoch == self.epoch and self.is_over)
        ):
            self.records.test(request.epoch, request.tested)
        if request.epoch < self.epoch:  # the request came late, or again: that epoch is over
            return LeaseAnswer(is_over=True, record=self.records.get(request.epoch))
        if request.epoch > self.epoch:
            if request.epoch != self.epoch + 1 or not self.is_over:
                raise FailedPrecondition(
                    f"epoch: {request.epoch} cannot begin yet; {len(self.done)} of {self.chunks} chunks of epoch "
                    f"{self.epoch} are done"
                )
            self.epoch, self.chunks, self.order = request.epoch, request.chunks, request.order
            self.done, self.leases, self.skips, self._first = set(), {}, {}, 0
        if request.chunks != self.chunks:
            raise FailedPrecondition(
                f"chunks: {request.chunks} here and {self.chunks} for another worker; all must read the same files "
                "with the same data and train settings"
            )
        if request.order != self.order and not self.is_over:
            raise FailedPrecondition(
                f"order: the samples of epoch {self.epoch} were leased in another order, by a worker with other files, "
                "other data or train settings, or another version of sparserow; go on with those, or begin another run"
            )
        done = [chunk for chunk in request.done if chunk in self.leases and self.leases[chunk].holder == holder]
        for chunk in done:
            del self.leases[chunk]
            self.done.add(chunk)
        if done and request.trained is not None:  # counts once: a repeated call has no chunk left to finish
            self.records.train(self.epoch, request.trained)
        for chunk, lease in list(self.leases.items()):  # also its own lease, when the answer was lost
            if lease.holder == holder or lease.holder not in known:
                del self.leases[chunk]
                self._skip(chunk, lease, -1)
        if self.is_over:
            return LeaseAnswer(is_over=True, record=self.records.get(self.epoch))
        while self._first in self.done:
            self._first += 1
        free = next((c for c in range(self._first, self.chunks) if c not in self.done and c not in self.leases), None)
        if free is None:
            return LeaseAnswer()
        skip = self.skips.pop(free, 0)
        self.leases[free] = DataLease(holder, request.step, skip)
        return LeaseAnswer(chunk=free, skip=skip)

    def at_cut(self, committed: dict[WorkerKey, int]) -> dict[str, Any]:
        """Returns the progress of the epoch in rows that are cut at the workers' last steps, for a checkpoint.

        Args:
            committed: the last step in the cut of each worker; -1 when there is none.
        """
        then = JobData.of_document(self.to_document())
        for holder in {lease.holder for lease in self.leases.values()}:
            then.left(holder, committed.get(holder, -1))
        saved = then.to_document()
        return {name: saved[name] for name in ("epoch", "chunks", "done", "skips", "records", "order")}

    def to_document(self) -> dict[str, Any]:
        """Returns the saved form: plain values for JSON."""
        return {
            "run": self.run,
            "generation": self.generation,
            "epoch": self.epoch,
            "chunks": self.chunks,
            "done": _runs(self.done),
            "leases": [[chunk, *lease.holder, lease.step, lease.skip] for chunk, lease in self.leases.items()],
            "skips": sorted(self.skips.items()),
            "records": self.records.to_document(),
            "order": self.order,
        }

    @staticmethod
    def of_document(saved: dict[str, Any]) -> JobData:
        """Returns the pass of a saved form."""
        leases = {chunk: DataLease((worker, epoch), step, skip) for chunk, worker, epoch, step, skip in saved["leases"]}
        return JobData(
            saved["run"],
            saved["generation"],
            saved["epoch"],
            saved["chunks"],
            _of_runs(saved["done"]),
            leases,
            dict(saved["skips"]),
            EpochRecords.of_document(saved["records"]),
            saved["order"],
        )


class DataLeases:
    """The leased data of all jobs of a cluster."""

    def __init__(self) -> None:
        self.jobs: dict[int, JobData | JobStream] = {}  # by job id

    def bound(self, running: Collection[int]) -> None:
        """Forgets the data of ended jobs beyond ``MOST_JOBS``; the jobs that began to read first are forgotten."""
        ended = [job_id for job_id in self.jobs if job_id not in running]
        for job_id in ended[:-MOST_JOBS]:
            del self.jobs[job_id]
        left = MOST_ENDED_EPOCHS
        for job_id in reversed(ended[-MOST_JOBS:]):
            data = self.jobs[job_id]
            if isinstance(data, JobStream):
                continue
            left -= len(data.records)
            if left < 0:
                data.records = EpochRecords()

    def left(self, job_id: int, holder: WorkerKey, last_step: int, *, is_orderly: bool) -> None:
        """Ends the leases of a worker that is gone, as :meth:`JobData.left` and :meth:`JobStream.left` do."""
        data = self.jobs.get(job_id)
        if isinstance(data, JobStream):
            data.left(holder, last_step, is_orderly=is_orderly)
        elif data is not None:
            data.left(holder, last_step)

    def answer(
        self, job_id: int, generation: int, request: LeaseRequest, holder: WorkerKey, known: Collection[WorkerKey]
    ) -> LeaseAnswer:
        """Answers a worker as :meth:`JobData.answer` does; a new job, or a new run, begins at ``request.epoch``.

        Raises:
            InvalidArgument: a number is out of range.
            FailedPrecondition: as for :meth:`JobData.answer`.
        """
        if not 0 < request.chunks <= MOST_CHUNKS:
            raise not_allowed("chunks", request.chunks, f"[1, {MOST_CHUNKS}]")
        if request.epoch < 1:
            raise not_allowed("epoch", request.epoch, ">= 1")
        if request.trained is not None:
            request.trained.check()
        data = self.jobs.get(job_id)
        if isinstance(data, JobStream):
            if data.is_read:
                raise FailedPrecondition("data.train: other workers of this job read a stream")
            data = None
        if data is None or (data.generation != generation and not data.goes_on(request)):
            data = self.jobs[job_id] = JobData(
                request.run, generation, request.epoch, request.chunks, order=request.order
            )
        data.generation, data.run = (
            generation,
            data.run or request.run,
        )  # restored data belongs to the run that asks first
        return replace(data.answer(request, holder, known), epoch=data.epoch)

    def answer_stream(
        self,
        job_id: int,
        generation: int,
        request: StreamRequest,
        holder: WorkerKey,
        members: Sequence[WorkerKey],
        known: Collection[WorkerKey],
    ) -> StreamAnswer:
        """Answers a worker as :meth:`JobStream.answer` does; a job that is started again goes on where it was.

        Raises:
            InvalidArgument: a number or a name is out of range.
            FailedPrecondition: as for :meth:`JobStream.answer`, or other workers read files.
        """
        request.check()
        data = self.jobs.get(job_id)
        if isinstance(data, JobData):
            if data.leases:
                raise FailedPrecondition("data.stream: other workers of this job read data.train")
            data = None
        if data is None:
            data = self.jobs[job_id] = JobStream(request.run, generation, request.source)
        data.generation = generation
        return data.answer(request, holder, members, known)

    def at_cut(self, committed: dict[int, dict[WorkerKey, int]]) -> dict[int, dict[str, Any]]:
        """Returns the result of :meth:`JobData.at_cut` or :meth:`JobStream.at_cut` by job id, for the jobs in the cut.

        The jobs are frozen, so the chunks that a worker has reported as done are in the cut.
        """
        return {job_id: data.at_cut(committed[job_id]) for job_id, data in self.jobs.items() if job_id in committed}

    def restore(self, job_id: int, generation: int, saved: dict[str, Any]) -> None:
        """Sets a job's data to what a checkpoint has (:meth:`at_cut`); {} sets it to the beginning."""
        self.jobs.pop(job_id, None)
        if not saved:
            return
        if is_of_stream(saved):
            self.jobs[job_id] = JobStream.of_document(saved).restored(generation)
            return
        self.jobs[job_id] = JobData(
            "",
            generation,
            saved["epoch"],
            saved["chunks"],
            _of_runs(saved["done"]),
            {},
            dict(saved["skips"]),
            EpochRecords.of_document(saved["records"]),
            saved["order"],
        )
