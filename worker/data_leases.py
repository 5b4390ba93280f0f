"""Leases of data by a session: which part of an epoch this worker trains on next."""

from __future__ import annotations

from ..proto.control import ControlClient
from ..proto.errors import FailedPrecondition
from .data.leased import Leased
from .session import Session


class SessionLeases:
    """Chunks of an epoch from the coordinator of a session.

    Args:
        session: of a worker of the job.
        run: names the run; workers of one run give the same.
        epochs: that it has.
    """

    def __init__(self, session: Session, run: str, epochs: int) -> None:
        if session.identity is None or not isinstance(session.catalog, ControlClient):
            raise FailedPrecondition("leases of data need a session with a coordinator")
        self._session, self._run, self._epochs = session, run, epochs
        self._identity, self._control = session.identity, session.catalog

    def lease(self, epoch: int, chunks: int, done: list[int]) -> Leased:
        """Says what is done, and asks for more.

        Raises:
            Fenced: this worker has left its job.
            FailedPrecondition: other workers count other chunks.
            Unavailable: the coordinator cannot be reached.
        """
        self._session.catch_up()  # from its first commit on the steps of a worker that joined are in a row
        reply = self._control.lease_data(
            self._identity,
            run=self._run,
            epoch=epoch,
            epochs=self._epochs,
            chunks=chunks,
            done=done,
            step=self._session.current_step,
        )
        return Leased(reply.chunk if reply.HasField("chunk") else None, reply.skip, reply.is_over, reply.epoch)
