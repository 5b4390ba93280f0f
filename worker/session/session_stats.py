"""What a session counts."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class SessionStats:
    """What a session did since it was made.

    Attributes:
        steps_committed, steps_aborted: ends of steps.
        rows_pulled, rows_pushed: unique rows that crossed to or from the shards.
        pulls: calls for rows; ``pulls_merged`` of them served all lookups of a forward at once.
        lookups_missed: lookups that had to pull although a merged pull or a prefetch went before.
        nonfinite_rows: summed gradients with NaN or Inf.
        clipped_rows: summed gradients that ``clip_row_norm`` shortened.
        rows_prefetched: unique rows that were pulled before their step began.
        rows_hinted: unique rows that shards with an SSD were told of before they were pulled.
        rows_deferred: rows of exact prefetch that were left for their step, as a step before it was to change them.
        rows_revalidated: of those prefetched, asked about again at their step, as others may have changed them.
        rows_refreshed: of those, had changed and were sent again; ``bytes_refreshed`` counts their float32 weights.
        cache_hits: unique rows that steps took from the row cache without asking; ``cache_misses`` were not there.
        cache_revalidated: rows that were there and were asked about; ``cache_refreshed`` of them had changed.
        cache_bytes_saved: float32 weights of hits, and of rows asked about that had not changed.
    """

    steps_committed: int
    steps_aborted: int
    rows_pulled: int
    rows_pushed: int
    pulls: int
    pulls_merged: int
    lookups_missed: int
    nonfinite_rows: int
    clipped_rows: int
    rows_prefetched: int
    rows_hinted: int
    rows_deferred: int
    rows_revalidated: int
    rows_refreshed: int
    bytes_refreshed: int
    cache_hits: int
    cache_misses: int
    cache_revalidated: int
    cache_refreshed: int
    cache_bytes_saved: int

    def cache(self) -> dict[str, int]:
        """The row cache's counters: hits, misses, revalidated, refreshed, bytes_saved."""
        return {name[6:]: value for name, value in asdict(self).items() if name.startswith("cache_")}
