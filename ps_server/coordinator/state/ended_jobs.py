"""Which ended jobs are remembered, and for how long. No I/O; not thread-safe.

A job that has ended is remembered by its name and by the worker ids of its ranks: a rank that comes back within the
time has its id again, and a worker can still tell why it ended. Nothing depends on that memory for correctness, since
the numbers of workers and of generations never come again (membership.py). So many jobs may shorten it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

MOST_JOBS = 1_024
MOST_RANKS = 8_192  # of all ended jobs together: about 300 KB of the saved state


class EndedJobs:
    """When each job ended that is remembered and does not run.

    Args:
        memory_sec: a job is forgotten so many seconds after its end.

    The times are not saved: after a restart of the coordinator each ended job is remembered for the whole time again.
    """

    def __init__(self, memory_sec: float) -> None:
        self._memory_sec = memory_sec
        self._since: dict[int, float] = {}  # by job id, the earliest first

    def to_forget(self, ranks: Mapping[int, int], running: Collection[int], now: float) -> list[int]:
        """The jobs that are remembered no longer, the one that ended first at the front.

        Args:
            ranks: of each job that is remembered, how many ranks it had.
            running: jobs that have members, or that shards may still know.
            now: seconds of a monotonic clock.
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
