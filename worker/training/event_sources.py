"""Opens the source of a job's stream, and leases its parts from the coordinator of a session."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from ...proto import control_pb2 as pb
from ...proto.config.data_config import DataConfig
from ...proto.config.job import JobConfig
from ...proto.config.stream_config import StreamConfig
from ...proto.control import ControlClient
from ...proto.errors import FailedPrecondition
from ..api.session import Session
from ..data import ClickReader, NamedBatch
from ..data.event_clock import EventClock
from ..data.events import EventSource, SourcePart
from ..data.sources.followed import FollowedFiles
from ..data.sources.kafka import KafkaSource
from ..data.sources.open_reader import event_decoder, file_source
from ..data.stream_reader import StreamBatch, StreamReader
from .process_group import WorkerGroup


def event_source(config: DataConfig, stream: StreamConfig) -> EventSource:
    """Returns the source of ``data.stream``.

    Raises:
        NotFound, InvalidArgument, DataLoss, FailedPrecondition: a file of ``like`` or an option cannot be used.
    """
    if stream.kafka is not None:
        return KafkaSource(
            stream.kafka,
            event_decoder(config),
            start=stream.start,
            until=stream.until,
            skips_lost=stream.on_lost == "skip",
            skips_bad=config.on_bad_line == "skip",
        )
    assert stream.follow is not None
    return FollowedFiles(stream.follow, file_source(config), is_endless=stream.until is None)


def stream_reader(
    job: JobConfig, reader: ClickReader[NamedBatch], session: Session, *, group: WorkerGroup, run: str
) -> StreamReader[NamedBatch]:
    """Returns what reads the events of ``data.stream`` that the coordinator leases to this worker.

    Args:
        job: the job, with the section.
        reader: makes batches of events.
        session: the session of this worker.
        group: this worker and its peers.
        run: the name of the run; all workers of a run give the same name.

    Raises:
        SparserowError: as of :func:`event_source` and :class:`SessionStreamLeases`.
    """
    stream = job.data.stream
    assert stream is not None
    source = event_source(job.data, stream)
    leases = SessionStreamLeases(session, run, source)
    meet = partial(_as_all, group) if job.train.dense == "ddp" else partial(_alone, job.train.staleness is not None)
    clock = None if stream.event_time is None else EventClock(**dict(stream.event_time))
    return StreamReader(
        reader, source, leases=leases, settle=leases.settle, max_wait=stream.max_wait, meet=meet, clock=clock
    )


def _alone(fills: bool, batches: int, *, is_over: bool) -> tuple[int, bool]:
    """Has a worker without events take a step where others may wait for its steps."""
    return max(batches, int(fills and not is_over)), is_over


def _as_all(group: WorkerGroup, batches: int, *, is_over: bool) -> tuple[int, bool]:
    """Has each worker take as many steps as the one with the most batches, as all of them average the gradients."""
    found = group.collect((batches, is_over))
    return max(count for count, _ in found), all(each for _, each in found)


class SessionStreamLeases:
    """Leases of a stream's parts from the coordinator of a session.

    Args:
        session: the session of this worker.
        run: the name of the run; all workers of a run give the same name.
        source: what is read.

    Raises:
        FailedPrecondition: the session has no coordinator.
    """

    def __init__(self, session: Session, run: str, source: EventSource) -> None:
        if session.core.identity is None or not isinstance(session.core.catalog, ControlClient):
            raise FailedPrecondition("data.stream: leases of its parts need a session with a coordinator")
        self._session, self._run, self._source = session, run, source
        self._identity, self._control = session.core.identity, session.core.catalog

    def settle(self) -> int:
        """Returns the step of this worker's last commit, when the shards have acknowledged all of them."""
        self._session.core.catch_up()  # first: the steps of a worker that joined must follow its first commit in a row
        self._session.flush()
        return self._session.current_step - 1

    def lease(
        self,
        *,
        settled: int,
        planned: Sequence[StreamBatch],
        found: Sequence[SourcePart],
        given_back: Sequence[str],
        lags: Mapping[str, int],
        idle: Sequence[str],
    ) -> pb.LeaseStreamReply:
        """Announces batches at the steps from ``settled`` + 1 on, and asks for parts."""
        return self._control.lease_stream(
            self._identity,
            run=self._run,
            source=self._source.name,
            settled=settled,
            planned=[
                pb.PlannedBatch(
                    step=step,
                    ends=_numbers(batch.ends),
                    ended=batch.ended,
                    counts=batch.counts,
                    times=_numbers(batch.times),
                )
                for step, batch in enumerate(planned, start=settled + 1)
            ],
            found=[
                pb.FoundPart(name=part.name, first=part.first, end=part.end, is_whole=part.is_whole) for part in found
            ],
            given_back=given_back,
            most=self._source.most,
            lags=lags,
            idle=idle,
        )


def _numbers(of_parts: Mapping[str, int]) -> list[pb.PartNumber]:
    return [pb.PartNumber(part=part, number=number) for part, number in of_parts.items()]
