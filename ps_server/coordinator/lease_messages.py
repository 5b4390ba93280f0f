"""Converts messages of LeaseData and LeaseStream to and from the state of the leases."""

from __future__ import annotations

from dataclasses import fields

from ...proto import control_pb2 as pb
from .state.data_leases import LeaseAnswer, LeaseRequest
from .state.epoch_records import EpochTest, Sums
from .state.stream_requests import EventCounts, PlannedBatch, StreamAnswer, StreamPart, StreamRequest


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


def stream_request_of(request: pb.LeaseStreamRequest) -> StreamRequest:
    """Returns the request of a worker that reads a stream."""
    return StreamRequest(
        run=request.run,
        source=request.source,
        settled=request.settled,
        planned=tuple(
            PlannedBatch(
                batch.step,
                {end.part: end.number for end in batch.ends},
                tuple(batch.ended),
                _event_counts(batch.counts),
                {each.part: each.number for each in batch.times},
            )
            for batch in request.planned
        ),
        found=tuple(
            StreamPart(part.name, part.first, part.end if part.HasField("end") else None, part.is_whole)
            for part in request.found
        ),
        given_back=tuple(request.given_back),
        most=request.most,
        lags={lag.part: lag.number for lag in request.lags},
        idle=frozenset(request.idle),
    )


def stream_reply(given: StreamAnswer) -> pb.LeaseStreamReply:
    """Returns the reply for an answer of the leases of a stream."""
    return pb.LeaseStreamReply(
        parts=[pb.LeasedPart(name=name, **vars(part)) for name, part in given.parts.items()],
        give_back=given.give_back,
        is_over=given.is_over,
        done_to=given.done_to,
        counts=pb.StreamCounts(**vars(given.counts)),
        is_begun=given.is_begun,
        watermark=given.watermark,
    )


def _event_counts(counts: pb.StreamCounts) -> EventCounts:
    """Returns what became of the events of a batch."""
    return EventCounts(**{each.name: getattr(counts, each.name) for each in fields(EventCounts)})
