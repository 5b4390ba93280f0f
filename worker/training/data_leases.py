"""Leases of data by a session: which part of an epoch this worker trains on next."""

from __future__ import annotations

from ...proto import control_pb2 as pb
from ...proto.control import ControlClient
from ...proto.errors import FailedPrecondition
from ..data.leased import EpochScore, Leased, Trained
from ..session.session import Session


class SessionLeases:
    """Chunks of an epoch from the coordinator of a session.

    Args:
        session: of a worker of the job.
        run: names the run; workers of one run give the same.
        epochs: that it has.
        again: a scheduler started this worker again, so a run that is over stays over.
    """

    def __init__(self, session: Session, run: str, epochs: int, *, again: bool = False) -> None:
        if session.core.identity is None or not isinstance(session.core.catalog, ControlClient):
            raise FailedPrecondition("leases of data need a session with a coordinator")
        self._session, self._run, self._epochs, self._again = session, run, epochs, again
        self._identity, self._control = session.core.identity, session.core.catalog

    def lease(self, epoch: int, chunks: int, done: list[int], trained: Trained | None = None) -> Leased:
        """Says what is done, and asks for more.

        Raises:
            Fenced: this worker has left its job.
            FailedPrecondition: other workers count other chunks.
            Unavailable: the coordinator cannot be reached.
        """
        self._session.core.catch_up()  # from its first commit on the steps of a worker that joined are in a row
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

    def tell_tested(self, epoch: int, chunks: int, tested: EpochScore) -> None:
        """Says how good the model was after an epoch that is over; raises as :meth:`lease`."""
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
        )
