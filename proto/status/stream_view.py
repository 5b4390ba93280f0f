"""What jobs have read of their streams, for screens and for JSON."""

from __future__ import annotations

import time
from dataclasses import dataclass

from .. import control_pb2 as pb


@dataclass(frozen=True)
class StreamView:
    """The stream of a job.

    Attributes:
        job: the job, as NAMESPACE/NAME.
        source: what it reads.
        parts: its partitions, or files that are not read to their end.
        lag: the events that are not read yet, as far as the workers know.
        events: the events that were trained on since the job began; of these, ``late`` were before the watermark and
            ``ahead`` too far ahead of the clock.
        events_per_sec: those of a second; None after a single reading.
        dead: the events that became dead letters, or were left out.
        empty: the events without a value.
        lost: the events that the source had no longer.
        watermark_sec: the time up to which all parts are read, in seconds since 1970 in UTC; None: times mean nothing,
            or it is not known yet.
        behind_sec: the seconds since then, by the clock of this process; None as above.
    """

    job: str
    source: str
    parts: int
    lag: int
    events: int
    events_per_sec: float | None
    dead: int
    empty: int
    lost: int
    late: int
    ahead: int
    watermark_sec: float | None
    behind_sec: float | None


def stream_views(before: pb.GetStatusReply | None, now: pb.GetStatusReply, seconds: float) -> tuple[StreamView, ...]:
    """Returns the streams of the jobs that read one.

    Args:
        before: an earlier status; None leaves rates unknown.
        now: a later status of the same cluster.
        seconds: the seconds between them.
    """
    gone = {job.job_id: job.stream.counts.events for job in ([] if before is None else before.jobs)}
    views = []
    for job in now.jobs:
        if not job.HasField("stream"):
            continue
        stream, counts = job.stream, job.stream.counts
        watermark = stream.watermark / 1e6 if stream.HasField("watermark") else None
        views.append(
            StreamView(
                f"{job.namespace}/{job.name}",
                stream.source,
                stream.parts,
                stream.lag,
                counts.events,
                max(0, counts.events - gone.get(job.job_id, 0)) / seconds if seconds > 0 else None,
                counts.dead,
                counts.empty,
                counts.lost,
                counts.late,
                counts.ahead,
                watermark,
                None if watermark is None else time.time() - watermark,
            )
        )
    return tuple(views)
