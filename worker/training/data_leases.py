"""Leases chunks of an epoch from the coordinator: they are the parts that this worker trains on next."""

from __future__ import annotations

from ...proto import control_pb2 as pb
from ...proto.control import ControlClient
from ...proto.errors import FailedPrecondition
from ..api.session import Session
from ..data.leased import EpochScore, Leased, Trained


class SessionLeases:
    """Leases of an epoch's chunks from the coordinator of a session.

    Args:
        session: the session of this worker.
        run: the name of the run; all workers of a run give the same name.
        epochs: the number of epochs of the run.
        order: the digest of the order of the samples, in which all workers of a run agree.
        again: whether a scheduler restarted this worker; then a run that has ended does not begin again.

    Raises:
        FailedPrecondition: the session has no coordinator.
    """

    def __init__(self, session: Session, run: str, epochs: int, *, order: int = 0, again: bool = False) -> None:
        if session.core.identity is None or not isinstance(session.core.catalog, ControlClient):
            raise FailedPrecondition("train.elastic: leases of data need a session with a coordinator")
        self._session, self._run, self._epochs, self._again = session, run, epochs, again
        self._order = order
        self._identity, self._control = session.core.identity, session.core.catalog

    def lease(self, epoch: int, chunks: int, done: list[int], trained: Trained | None = None) -> Leased:
        """Reports finished chunks to the coordinator, and asks for another one.

        Args:
            epoch: the epoch, from 1.
            chunks: the number of chunks of the epoch.
            done: the chunks that this worker has finished since its last call.
            trained: this worker's sums over the epoch so far; None: there is nothing to report.

        Returns:
            The next chunk, or the end of the epoch with its sums over all workers.

        Raises:
            Fenced: this worker has left its job.
            FailedPrecondition: other workers gave another number of chunks, or another order.
            Unavailable: the coordinator cannot be reached.
        """
        self._session.core.catch_up()  # first: the steps of a worker that joined must follow its first commit in a row
        reply = self._ask(epoch, chunks, done, trained=None if trained is None else pb.EpochSums(**vars(trained)))
        sums, tested = reply.trained, reply.tested
        return Leased(
            reply.chunk if reply.HasField("chunk") else None,
            reply.skip,
            reply.is_over,
            reply.epoch,
            Trained(sums.samples, sums.measured, sums.loss_sum, sums.seconds) if reply.HasField("trained") else None,
            EpochScore(tested.samples_per_sec, tested.auc, tested.log_loss) if reply.HasField("tested") else None,
        )

    def report_tested(self, epoch: int, chunks: int, tested: EpochScore) -> None:
        """Reports the evaluation of an epoch that has ended to the coordinator.

        Args:
            epoch: the epoch, from 1.
            chunks: the number of chunks of the epoch.
            tested: the result of the evaluation.

        Raises:
            Fenced: this worker has left its job.
            FailedPrecondition: other workers gave another number of chunks.
            Unavailable: the coordinator cannot be reached.
        """
        self._ask(epoch, chunks, [], tested=pb.EpochTest(**vars(tested)))

    def _ask(
        self,
        epoch: int,
        chunks: int,
        done: list[int],
        *,
        trained: pb.EpochSums | None = None,
        tested: pb.EpochTest | None = None,
    ) -> pb.LeaseDataReply:
        return self._control.lease_data(
            self._identity,
            run=self._run,
            epoch=epoch,
            epochs=self._epochs,
            chunks=chunks,
            done=done,
            step=self._session.current_step,
            trained=trained,
            tested=tested,
            again=self._again,
            order=self._order,
        )
