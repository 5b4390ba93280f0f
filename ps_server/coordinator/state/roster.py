"""A job's workers as shards know them: the steps for which each counts, and the ends of those that left. No I/O.

Membership changes in an operation of two phases. FREEZE: every shard takes no new commit of the job, fences the workers
that are gone, and reports what each worker committed. RESOLVE: one decision from all reports, told to all shards.
So the N of 1/N and the workers of a step are equal on all shards, and a commit in doubt of a worker that is gone is
applied on all shards or on none.

Invariants:
 1. A worker counts from the step after the highest one accepted anywhere when it came.
 2. One that left counts up to its own last step (staleness 0), or up to the highest step accepted anywhere, for the
    others are ahead of it and counted it until now.
 3. What it has in doubt is applied where it is prepared when any shard has taken that commit, else it is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .membership import Ticket

WorkerKey = tuple[int, int]  # (worker id, epoch)


@dataclass(frozen=True)
class Span:
    """The steps that a worker counts for.

    Attributes:
        until_step: None while it lives.
        final_sequence: of one that left: its last commit that any shard has; 0 when there is none.
    """

    worker_id: int
    epoch: int
    rank: int
    first_step: int
    until_step: int | None = None
    final_sequence: int = 0

    @property
    def key(self) -> WorkerKey:
        """(worker id, epoch)."""
        return self.worker_id, self.epoch


@dataclass(frozen=True)
class CommitWindow:
    """What one shard has of one worker; sequence 0 and step -1 before its first commit."""

    committed_sequence: int = 0
    committed_step: int = -1


@dataclass
class Roster:
    """One job as its shards were last told.

    Attributes:
        generation: whose clock the spans are of; 0 before the first.
        operation: number of the last decision.
    """

    name: str
    staleness: int | None
    generation: int = 0
    operation: int = 0
    spans: dict[WorkerKey, Span] = field(default_factory=dict)

    def gone(self, members: Iterable[Ticket]) -> list[WorkerKey]:
        """Workers that live for the shards and are no members any more."""
        present = {(ticket.worker_id, ticket.epoch) for ticket in members}
        return [span.key for span in self.spans.values() if span.until_step is None and span.key not in present]

    def has_all(self, members: Iterable[Ticket]) -> bool:
        """Whether each of them counts already."""
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
            operation: its number.
            gone: the workers that left.
            reports: what each of the shards has, by worker.
            newcomers: members of this generation; those that are known already stay as they are.
            reached: steps up to here are over, whatever the reports say.
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

    def begin_generation(self, generation: int, name: str, staleness: int | None) -> None:
        """Begins a new clock, for which no worker counts yet."""
        self.generation, self.name, self.staleness = generation, name, staleness
        self.spans.clear()

    def _prune(self, reports: Sequence[Mapping[WorkerKey, CommitWindow]]) -> None:
        """Forgets workers that left before the first step that any live worker has still to commit somewhere."""
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
        """Whether a shard lacks its last commit, as far as the reports go."""
        return any(report.get(span.key, CommitWindow()).committed_sequence < span.final_sequence for report in reports)
