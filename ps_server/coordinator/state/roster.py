"""A job's workers as shards know them: the steps for which each counts, and the ends of workers that left.

Membership changes in an operation of two phases. FREEZE: every shard refuses new commits of the job, fences the workers
that are gone, and reports what each worker committed. RESOLVE: one decision is made from all reports and sent to all
shards. So the N of 1/N and the workers of a step are equal on all shards. A doubtful commit of a worker that is gone is
applied on all shards or on none. The module does no I/O.

Invariants:
 1. A worker counts from the step after the highest step that any shard had accepted when it joined.
 2. A worker that left counts up to its own last step with staleness 0. Otherwise it counts up to the highest step that
    any shard accepted, because the other workers are ahead of it and counted it until now.
 3. Its doubtful commit is applied where it is prepared when any shard has accepted that commit; otherwise it is
    forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .membership import Ticket

WorkerKey = tuple[int, int]  # (worker id, epoch)


@dataclass(frozen=True)
class Span:
    """The steps for which a worker counts.

    Attributes:
        first_step: the first step for which it counts.
        until_step: the last step for which it counts; None while it lives.
        final_sequence: the last commit that any shard has of a worker that left; 0 when there is none.
    """

    worker_id: int
    epoch: int
    rank: int
    first_step: int
    until_step: int | None = None
    final_sequence: int = 0

    @property
    def key(self) -> WorkerKey:
        """The pair (worker id, epoch)."""
        return self.worker_id, self.epoch


@dataclass(frozen=True)
class CommitWindow:
    """The commits that one shard has of one worker; before the first, the sequence is 0 and the step is -1.

    Attributes:
        committed_sequence: the highest sequence that was taken.
        committed_step: the highest step that was taken.
        steps_taken: the number of commits of steps of this clock.
        writes_taken: the number of writes by key of this clock.
    """

    committed_sequence: int = 0
    committed_step: int = -1
    steps_taken: int = 0
    writes_taken: int = 0

    @property
    def taken(self) -> int:
        """The number of commits and writes of this clock."""
        return self.steps_taken + self.writes_taken


@dataclass
class Roster:
    """One job in the state that its shards know.

    Attributes:
        name: the full name of the job.
        staleness: the bound on staleness, in steps; None means asynchronous.
        generation: the generation whose clock the spans belong to; 0 before the first.
        operation: the number of the last decision.
        spans: the steps for which each worker counts.
        quorum: the number of members of a step, with staleness 0; None means all workers.
    """

    name: str
    staleness: int | None
    generation: int = 0
    operation: int = 0
    spans: dict[WorkerKey, Span] = field(default_factory=dict)
    quorum: int | None = None

    def gone(self, members: Iterable[Ticket]) -> list[WorkerKey]:
        """Returns the workers that live for the shards, and are not members any more."""
        present = {(ticket.worker_id, ticket.epoch) for ticket in members}
        return [span.key for span in self.spans.values() if span.until_step is None and span.key not in present]

    def has_all(self, members: Iterable[Ticket]) -> bool:
        """Whether each of these members counts already."""
        return all((ticket.worker_id, ticket.epoch) in self.spans for ticket in members)

    def decide(
        self,
        operation: int,
        gone: Iterable[WorkerKey],
        reports: Sequence[Mapping[WorkerKey, CommitWindow]],
        newcomers: Iterable[Ticket],
        *,
        reached: int = -1,
    ) -> None:
        """Takes the decision of one operation.

        Args:
            operation: the number of the operation.
            gone: the workers that left.
            reports: the commits that each shard has, by worker.
            newcomers: the members of this generation; members that are known already are unchanged.
            reached: steps up to this one are over, whatever the reports say.
        """
        self.operation = operation
        top = max((window.committed_step for report in reports for window in report.values()), default=-1)
        top = max(top, reached)
        for key in gone:
            span = self.spans[key]
            windows = [report.get(key, CommitWindow()) for report in reports]
            own = max((window.committed_step for window in windows), default=-1)
            final = max((window.committed_sequence for window in windows), default=0)
            until = own if self.staleness == 0 else max(own, top)
            self.spans[key] = replace(span, until_step=max(until, span.first_step - 1), final_sequence=final)
        for ticket in newcomers:
            span = Span(ticket.worker_id, ticket.epoch, ticket.rank, top + 1)
            self.spans.setdefault(span.key, span)
        self._prune(reports)

    def begin_generation(self, generation: int, name: str, staleness: int | None, quorum: int | None = None) -> None:
        """Begins a new clock, for which no worker counts yet."""
        self.generation, self.name, self.staleness, self.quorum = generation, name, staleness, quorum
        self.spans.clear()

    def _prune(self, reports: Sequence[Mapping[WorkerKey, CommitWindow]]) -> None:
        """Forgets workers that left before the first step that any live worker has still to commit on some shard."""
        live = [span for span in self.spans.values() if span.until_step is None]
        if not live:
            return
        reached = min(
            max(report.get(span.key, CommitWindow()).committed_step, span.first_step - 1)
            for span in live
            for report in reports or [{}]
        )
        for span in list(self.spans.values()):
            if span.until_step is not None and span.until_step < reached and not self._in_doubt(span, reports):
                del self.spans[span.key]

    @staticmethod
    def _in_doubt(span: Span, reports: Sequence[Mapping[WorkerKey, CommitWindow]]) -> bool:
        """Whether a shard lacks the worker's last commit, according to the reports."""
        return any(report.get(span.key, CommitWindow()).committed_sequence < span.final_sequence for report in reports)
