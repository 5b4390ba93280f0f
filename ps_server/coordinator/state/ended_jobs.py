"""Decides which ended jobs are remembered, and for how long. The module does no I/O and is not thread-safe.

An ended job is remembered by its name and by the worker ids of its ranks. A rank that comes back in time gets its id
again, and a worker can still report why it ended. Correctness does not depend on this memory, because numbers of
workers and of generations are never used again (membership.py). Therefore a large number of jobs may shorten it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

MOST_JOBS = 1_024
MOST_RANKS = 8_192  # ranks of all ended jobs together, about 300 KB of the saved state


class EndedJobs:
    """The times at which remembered jobs ended.

    The times are not saved: after a restart of the coordinator each ended job is remembered for the whole time again.

    Args:
        memory_sec: the seconds after its end at which a job is forgotten.
    """

    def __init__(self, memory_sec: float) -> None:
        self._memory_sec = memory_sec
        self._since: dict[int, float] = {}  # the time of the end by job id, the earliest first

    def to_forget(self, ranks: Mapping[int, int], running: Collection[int], now: float) -> list[int]:
        """Returns the jobs that are to be forgotten; the job that ended first comes first.

        Args:
            ranks: the number of ranks of each remembered job, by job id.
            running: jobs that have members, or that shards may still know.
            now: the present time of a monotonic clock, in seconds.
        """
        for job_id in [job_id for job_id in self._since if job_id in running or job_id not in ranks]:
            del self._since[job_id]
        for job_id in ranks:
            if job_id not in running:
                self._since.setdefault(job_id, now)
        jobs, kept_ranks = len(self._since), sum(ranks[job_id] for job_id in self._since)
        forgotten = []
        for job_id, since in self._since.items():
            if now - since < self._memory_sec and jobs <= MOST_JOBS and kept_ranks <= MOST_RANKS:
                break
            forgotten.append(job_id)
            jobs, kept_ranks = jobs - 1, kept_ranks - ranks[job_id]
        return forgotten
