"""What a worker says of itself to its job while it trains."""

from __future__ import annotations


class WorkerNotes:
    """Takes what the heartbeats of a worker say of it. This one is of a worker without heartbeats, and drops all."""

    def note_work(self, is_on: bool) -> None:
        """Says that this worker is busy, so that the others of its job wait for its steps.

        Args:
            is_on: whether it is at work; False ends it.
        """

    def note_trained(self, samples: int, loss_sum: float) -> None:
        """Adds samples that were trained on, and the sum of their losses, which may be not finite."""

    def note_auc(self, auc: float) -> None:
        """Notes the AUC of recent samples, each predicted before it was trained on; NaN: it has none."""

    def note_test(self, metric: str, value: float) -> None:
        """Notes the result of the last test: the name of a metric, and its value."""
