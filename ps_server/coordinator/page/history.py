"""The last hour of a cluster in a few dozen series, for the charts of the page. The module does no I/O."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ....proto.status.cluster_status import ClusterStatus
from ....proto.status.figures import measured
from ....proto.status.job_view import JobView
from ....proto.status.shard_view import ShardView
from .series_ring import SeriesRing

EVERY_SEC = 10.0
POINTS = 360  # one hour
MOST_JOBS = 64  # with series; jobs beyond these have figures alone
SHARD_GROUP = 12  # points of a shard's series that a reply has as one, because 1,000 shards have many
SHARD_SERIES = ("rows_pulled_per_sec", "memory_bytes")
_OF_VIEW = ("highest_step", "steps_per_sec", "samples_per_sec", "loss", "auc", "test_value")  # fields of a JobView
JOB_SERIES = (*_OF_VIEW, "workers", "events_per_sec")


class ClusterHistory:
    """The series of one cluster. It is not thread-safe.

    Args:
        shards: the number of shards, which is fixed.
    """

    def __init__(self, shards: int) -> None:
        self._shards = shards
        names = tuple(_cluster_point(()))
        self._names = names
        self._first_job = len(names) + shards * len(SHARD_SERIES)
        self._ring = SeriesRing(self._first_job + MOST_JOBS * len(JOB_SERIES), POINTS)
        self._jobs: dict[str, int] = {}  # the place of each job; the one that was seen last stands last
        self.samples = 0

    @property
    def nbytes(self) -> int:
        """The bytes of all series, which do not change."""
        return self._ring.nbytes

    def add(self, view: ClusterStatus | None) -> None:
        """Adds a point to all series.

        Args:
            view: the figures since the point before; None: the cluster could not be read, which leaves a gap.
        """
        self.samples += 1
        if view is None:
            self._ring.add([None] * self._ring.width)
            return
        point: list[float | None] = list(_cluster_point(view.shards).values())
        by_index = {shard.shard: shard for shard in view.shards}
        for index in range(self._shards):
            shard = by_index.get(index)
            point += [None] * len(SHARD_SERIES) if shard is None else [getattr(shard, name) for name in SHARD_SERIES]
        point += [None] * (self._ring.width - len(point))
        events = {stream.job: stream.events_per_sec for stream in view.streams}
        for job, place in self._places(view.jobs):
            begin = self._place(place)
            point[begin : begin + len(JOB_SERIES)] = [
                *(getattr(job, name) for name in _OF_VIEW),
                float(len(job.members)),
                events.get(job.job),
            ]
        self._ring.add(point)

    def to_document(self, namespaces: Collection[str] | None) -> dict[str, Any]:
        """Returns the series as plain values for JSON, the oldest point first; a gap is None.

        Args:
            namespaces: the namespaces whose jobs are shown; None means all.
        """
        ring = self._ring
        shards: dict[str, Any] = {"every_sec": EVERY_SEC * SHARD_GROUP}
        for offset, name in enumerate(SHARD_SERIES):
            first = len(self._names) + offset
            shards[name] = [ring.means(first + len(SHARD_SERIES) * i, SHARD_GROUP) for i in range(self._shards)]
        jobs = {
            job: {name: ring.series(self._place(place) + offset) for offset, name in enumerate(JOB_SERIES)}
            for job, place in self._jobs.items()
            if namespaces is None or job.partition("/")[0] in namespaces
        }
        cluster = {name: ring.series(index) for index, name in enumerate(self._names)}
        return {"every_sec": EVERY_SEC, "cluster": cluster, "shards": shards, "jobs": jobs}

    def _place(self, place: int) -> int:
        return self._first_job + place * len(JOB_SERIES)

    def _places(self, jobs: Collection[JobView]) -> list[tuple[JobView, int]]:
        """Gives each job its place; a job that is gone gives its place up when another needs it."""
        now = {job.job for job in jobs}
        found = []
        for job in jobs:
            place = self._jobs.pop(job.job, None)
            if place is None:
                place = self._free_place(now)
                if place is None:
                    continue
            self._jobs[job.job] = place
            found.append((job, place))
        return found

    def _free_place(self, now: Collection[str]) -> int | None:
        if len(self._jobs) < MOST_JOBS:
            return len(self._jobs)
        gone = next((job for job in self._jobs if job not in now), None)
        if gone is None:
            return None
        place = self._jobs.pop(gone)
        self._ring.clear(range(self._place(place), self._place(place + 1)))
        return place


def _cluster_point(shards: Collection[ShardView]) -> dict[str, float | None]:
    """Returns a point of each series of the whole cluster, by name."""

    def total(name: str) -> float | None:
        known = measured(getattr(shard, name) for shard in shards)
        return sum(known) if known else None

    def worst(kind: str) -> float | None:
        known = measured(shard.p99(kind) for shard in shards)
        return max(known) if known else None

    return {
        "shards_serving": float(sum(shard.state == "serving" for shard in shards)),
        **{name: total(name) for name in ("rows", "ssd_rows", "memory_bytes", "ssd_bytes")},
        **{name: total(name) for name in ("requests_per_sec", "rows_pulled_per_sec", "rows_applied_per_sec")},
        **{name: total(name) for name in ("bytes_per_sec", "connections", "followers", "commits_lost")},
        **{f"{kind}_p99_sec": worst(kind) for kind in ("pull", "commit", "lookup")},
    }
