"""Converts messages of LeaseData to and from the state of the leases."""

from __future__ import annotations

from ...proto import control_pb2 as pb
from .state.data_leases import LeaseAnswer, LeaseRequest
from .state.epoch_records import EpochTest, Sums


def lease_request_of(request: pb.LeaseDataRequest) -> LeaseRequest:
    """Returns the request of a worker."""
    trained, tested = request.trained, request.tested
    return LeaseRequest(
        run=request.run,
        epoch=request.epoch,
        chunks=request.chunks,
        done=request.done,
        step=request.step,
        epochs=request.epochs,
        trained=Sums(trained.samples, trained.measured, trained.loss_sum, trained.seconds)
        if request.HasField("trained")
        else None,
        tested=EpochTest(tested.samples_per_sec, tested.auc, tested.log_loss) if request.HasField("tested") else None,
        again=request.again,
        order=request.order,
    )


def lease_reply(given: LeaseAnswer) -> pb.LeaseDataReply:
    """Returns the reply for an answer of the leases."""
    reply = pb.LeaseDataReply(chunk=given.chunk, skip=given.skip, is_over=given.is_over, epoch=given.epoch)
    if given.record is not None:
        reply.trained.CopyFrom(pb.EpochSums(**vars(given.record.trained)))
        if given.record.tested is not None:
            reply.tested.CopyFrom(pb.EpochTest(**vars(given.record.tested)))
    return reply
