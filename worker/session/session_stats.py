"""The counters of a session. Each is one line here, whose sentence the metrics and the documents repeat."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields


def _counter(text: str) -> int:
    counted: int = field(metadata={"text": text})
    return counted


def _gauge(text: str) -> int:
    measured: int = field(metadata={"text": text, "is_gauge": True, "is_of_python": True})
    return measured


def _counter_of_python(text: str) -> int:
    counted: int = field(metadata={"text": text, "is_of_python": True})
    return counted


@dataclass(frozen=True)
class SessionStats:
    """The counters of a session since it was made. :meth:`describe` has a sentence for each."""

    steps_committed: int = _counter("Steps committed (count).")
    steps_aborted: int = _counter("Steps that no worker took (count).")
    refused_steps: int = _counter("Steps that had their quorum without this worker when it was done with them (count).")
    missed_steps: int = _counter("Steps that this worker passed over after such a refusal, for the open one (count).")
    rows_pulled: int = _counter("Unique rows that came from the shards (count).")
    rows_pushed: int = _counter("Unique rows whose gradients went to the shards (count).")
    pulls: int = _counter("Calls for rows (count).")
    pulls_merged: int = _counter("Calls for rows that served all lookups of a forward at once (count).")
    lookups_missed: int = _counter("Lookups that had to pull although a merged pull or a prefetch went before (count).")
    nonfinite_rows: int = _counter("Summed gradients of rows with NaN or Inf (count).")
    clipped_rows: int = _counter("Summed gradients of rows that ``clip_row_norm`` shortened (count).")
    rows_prefetched: int = _counter("Unique rows that were pulled before their step began (count).")
    batches_aside: int = _counter_of_python("Batches of a prefetch whose rows were left to their forward (count).")
    batches_unhinted: int = _counter_of_python(
        "Batches of a prefetch with hints whose keys no shard got, as steps are no slower without (count)."
    )
    rows_hinted: int = _counter("Unique rows named to shards with an SSD before they were pulled (count).")
    rows_deferred: int = _counter("Rows of a prefetch that were left for their step, which changes them (count).")
    rows_revalidated: int = _counter("Prefetched rows that were asked about again at their step (count).")
    rows_refreshed: int = _counter("Prefetched rows that had changed and were sent again (count).")
    bytes_refreshed: int = _counter("Float32 weights of prefetched rows that were sent again (bytes).")
    cache_hits: int = _counter("Unique rows that steps took from the row cache without asking (count).")
    cache_misses: int = _counter("Unique rows that steps sought in the row cache in vain (count).")
    cache_revalidated: int = _counter("Unique rows of the row cache that were asked about by version (count).")
    cache_refreshed: int = _counter("Rows asked about by version that had changed and were sent again (count).")
    cache_bytes_saved: int = _counter("Float32 weights of hits and of rows asked about that had not changed (bytes).")
    device_tables: int = _gauge("Tables whose rows are on the devices of the ranks (count).")
    device_table_bytes: int = _gauge("Weights and state of device_tables that this rank has (bytes).")

    @classmethod
    def describe(cls) -> dict[str, str]:
        """Returns a sentence with its unit for each counter, by the counter's name."""
        return {each.name: each.metadata["text"] for each in fields(cls)}

    @classmethod
    def gauges(cls) -> frozenset[str]:
        """Returns the names of those counters that say how much there is now, and may fall."""
        return frozenset(each.name for each in fields(cls) if each.metadata.get("is_gauge"))

    @classmethod
    def of_python(cls) -> frozenset[str]:
        """Returns the names of those counters that the native half of a session does not keep."""
        return frozenset(each.name for each in fields(cls) if each.metadata.get("is_of_python"))

    def cache(self) -> dict[str, int]:
        """Returns the row cache's counters: hits, misses, revalidated, refreshed, bytes_saved."""
        return {name[6:]: value for name, value in asdict(self).items() if name.startswith("cache_")}
