"""Data-plane client and session of a worker. Calls that wait or touch rows release the GIL."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64] | NDArray[np.uint64]

# A batch tensor of a merged pull: (address the ops see, address on the host, sizes, strides, bytes an item).
_BatchTensor = tuple[int, int, tuple[int, ...], tuple[int, ...], int]

def set_error_factory(factory: Callable[[int, str], BaseException]) -> None:
    """Registers how a native error (number of its code, message) becomes an exception."""

def build() -> dict[str, str]:
    """What the core was built with and for.

    Returns:
        ``compiler``; ``kernels``: the widest instruction set of this CPU that has kernels; ``torch``: the version that
        the operators were compiled for; ``rocksdb`` and ``openssl``: the versions of the libraries that are loaded, ""
        where the build has no RocksDB.
    """

def set_trace(trace_id: bytes = b"", span_id: bytes = b"") -> None:
    """Requests that the calling thread makes from now on carry these ids (W3C trace context: 16 and 8 bytes) to the
    shards; without them: none. Raises InvalidArgument for another length.
    """

def are_finite(parts: Sequence[tuple[int, int]]) -> bool:
    """Returns whether all values are finite.

    Args:
        parts: the address of each block of float32 on the host, and the number of its values; the caller keeps the
            blocks alive.
    """

def id_of_name(name: str) -> int:
    """32-bit table id of ``namespace/name``; never 0."""

def text_keys(offsets: NDArray[np.int64], bytes: Any) -> NDArray[np.int64]:  # noqa: A002
    """Keys of n texts, (n) int64, each ``hash_key`` of its bytes.

    Args:
        offsets: where each text begins in ``bytes``, and the end of the last, (n + 1) int64, ascending.
        bytes: a buffer of bytes, such as the values of an Arrow array of large_binary.

    Raises:
        InvalidArgument: the offsets are not ascending places within the bytes.
    """

class RowReader:
    """What holds a session's rows: the seam that ``Client.shards`` and in-process shards share."""

    @property
    def shard_count(self) -> int: ...

class ClientShards(RowReader):
    """The shards behind a :class:`Client`."""

class Scan:
    """Pages of one shard's rows: keys, versions, update counts, rows (n, dim), state (n, floats of state or 0)."""

    def __iter__(
        self,
    ) -> Iterator[
        tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32]]
    ]: ...
    def __next__(
        self,
    ) -> tuple[
        NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32]
    ]: ...

class Client:
    """A connection to every shard. Thread-safe; unusable after ``fork``, and says so.

    Keys are int64 >= 0 or uint64, shape (n), in any order, and may repeat. A lost connection is opened again and
    the request sent again until its deadline; commits are deduplicated by the shards.

    Args:
        shards: (host, port) by shard index.
        slot_owner: (slot_count) shard index of each slot.
        route_epoch: of ``slot_owner``.
        cluster_id: 0 accepts any.
        namespace_id: for the shards' books.
        job_id, worker_id, worker_epoch: as registered; reads without a step need none.
        wire_dtype: of rows and gradients on the network.
        frame_crc: checksum every frame, both ways.
        connect_timeout_ms: of this call, and of each later attempt.
        replay_bytes: of commits that are kept for each shard, to be sent again to a process that takes its place; the
            newest one in any case. 0: none.
        tls: (authorities, own certificate or "", its key or "") in PEM; None: plain TCP.
        token: shown to the shards; "": none.
        worker_proof: 16 bytes that the coordinator gave this worker; b"": none.
        has_quorum: whether the job's steps have a quorum, so that shard 0 is asked first to commit a step.
        transport: "auto": through shared memory where a shard is of this host and user and TLS is off, else by TCP;
            "tcp": by TCP; "shm": through shared memory alone.

    Raises:
        Unavailable: a shard cannot be reached (names it).
        FailedPrecondition: a shard is of another cluster, hash version or slot count.
        InvalidArgument: an argument is out of its range.
    """

    def __init__(
        self,
        *,
        shards: Sequence[tuple[str, int]],
        slot_owner: NDArray[np.uint16],
        route_epoch: int,
        cluster_id: int = 0,
        namespace_id: int = 0,
        job_id: int = 0,
        worker_id: int = 0,
        worker_epoch: int = 0,
        wire_dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        frame_crc: bool = False,
        connect_timeout_ms: int = 5000,
        replay_bytes: int = 0,
        tls: tuple[str, str, str] | None = None,
        token: str = "",
        worker_proof: bytes = b"",
        has_quorum: bool = False,
        transport: Literal["auto", "tcp", "shm"] = "auto",
    ) -> None: ...
    @property
    def shards(self) -> ClientShards:
        """For a session."""

    def transports(self) -> list[Literal["tcp", "tls", "unix", "shm", "none"]]:
        """How each shard is reached now; "unix": by a local socket without memory, "none": there is no connection."""

    def extend(self, grace_ms: int) -> None:
        """A shard is being restored: calls that wait go on waiting for so long from now, whatever their deadline."""

    def acknowledged_commits(self) -> list[int]:
        """How many commits and writes with a sequence each shard has acknowledged since the clock began, by shard."""

    def touch(self, *, deadline_ms: int) -> None:
        """Asks every shard for a sign of life; one that came back gets what is held for it.

        Raises:
            Unavailable, DeadlineExceeded: one did not answer.
        """

    def move(self, shard: int, host: str, port: int) -> None:
        """The shard listens elsewhere now, as one that came back may: whatever has no answer yet is asked there.
        Harmless when it is where it was.
        """

    def show(self, *, tls: tuple[str, str, str] | None, token: str) -> None:
        """Shows these certificates and this token from now on: connections are made anew, and whatever has no answer
        yet is asked there.

        Raises:
            InvalidArgument: a text is not a certificate or key; nothing changes.
        """

    def end(self, reason: str) -> None:
        """No call can succeed any more: those that wait, and all later ones, raise Unavailable with this reason."""

    def pull(
        self,
        table_id: int,
        keys: Keys,
        *,
        dim: int,
        schema_version: int = 1,
        step: int = -1,
        deadline_ms: int = 30000,
        versions: bool = False,
        found: bool = False,
    ) -> tuple[NDArray[np.float32], NDArray[np.uint64] | None, NDArray[np.bool_] | None]:
        """Rows (n, dim) float32 and, where asked for, versions (n) and found (n), in the order of ``keys``.

        Args:
            step: of the job's clock; -1 reads without one.

        Raises:
            InvalidArgument, NotFound, StaleRoute, Fenced, Unavailable, DeadlineExceeded (names the workers).
        """

    def push(
        self,
        table_id: int,
        keys: Keys,
        grads: NDArray[np.float32],
        *,
        dim: int,
        lr: float,
        sequence: int,
        schema_version: int = 1,
        step: int = -1,
        grad_sum: bool = False,
        deadline_ms: int = 30000,
        on_nonfinite: Literal["raise", "send"] = "raise",
    ) -> None:
        """Commits gradients (n, dim); those of repeated keys are summed in float32 in order.

        Args:
            sequence: of this worker; a shard applies each once, however often it is sent.
            step: of the job's clock; -1 applies at once.
            grad_sum: do not divide by the number of workers.
            on_nonfinite: "raise" refuses NaN and Inf (count and first key), nothing is sent. "send" sends them; shards
                take them with a step alone.

        Raises:
            ResourceExhausted: a shard has no memory for it; that shard applied nothing.
            InvalidArgument, NotFound, FailedPrecondition, StaleRoute, Fenced, Unavailable, DeadlineExceeded.
        """

    def prepare(
        self,
        table_id: int,
        keys: Keys,
        grads: NDArray[np.float32],
        *,
        dim: int,
        lr: float,
        sequence: int,
        schema_version: int = 1,
        step: int = -1,
        grad_sum: bool = False,
        deadline_ms: int = 30000,
        on_nonfinite: Literal["raise", "send"] = "raise",
    ) -> None:
        """As ``push``, but every shard only holds the gradients, with memory promised, until the second phase."""

    def commit_prepared(
        self, *, sequence: int, step: int = -1, grad_sum: bool = False, deadline_ms: int = 30000
    ) -> None:
        """Applies what ``prepare`` brought. Raises FailedPrecondition when a shard holds nothing of it."""

    def abort(self, *, sequence: int, step: int = -1, grad_sum: bool = False, deadline_ms: int = 30000) -> None:
        """Forgets what ``prepare`` brought."""

    def assign(
        self,
        table_id: int,
        keys: Keys,
        rows: NDArray[np.float32],
        *,
        dim: int,
        schema_version: int = 1,
        sequence: int = 0,
        deadline_ms: int = 30000,
    ) -> None:
        """Sets weights (n, dim), creating rows; of a repeated key the last row stands. Once for each sequence; 0: each
        time it comes.
        """

    def erase(self, table_id: int, keys: Keys, *, sequence: int = 0, deadline_ms: int = 30000) -> int:
        """Removes rows; returns how many existed. Once for each sequence; 0: each time it comes."""

    def scan(
        self, table_id: int, *, shard: int, max_rows: int = 65536, with_state: bool = False, deadline_ms: int = 30000
    ) -> Scan:
        """Walks one shard's rows in unspecified order; ``deadline_ms`` is of each page."""

    def stats(self) -> dict[str, int]:
        """Counters: frames_sent, bytes_sent, bytes_received, reconnects, retries."""

class LocalShards(RowReader):
    """Stores of this process."""

class LocalCluster:
    """LocalShards with the stores they own."""

    def __init__(self, *, shards: int, slot_count: int, memory_budget_bytes: int) -> None: ...
    @property
    def shards(self) -> LocalShards: ...
    def create_table(
        self,
        *,
        id: int,  # noqa: A002
        version: int,
        name: str,
        dim: int,
        dtype: int,
        seed: int,
        init: tuple[int, float, float],
        optimizer: dict[str, Any],
        policy: dict[str, Any],
    ) -> None: ...
    def drop_table(self, table_id: int) -> None: ...
    def rows(self, table_id: int) -> int: ...

class FlatRows:
    """cpp_ext/commit/flat_rows.h: rows of a table in arrays of the caller. Arguments are those of ``create_table``."""

    def __init__(
        self,
        *,
        id: int,  # noqa: A002
        version: int,
        name: str,
        dim: int,
        dtype: int,
        seed: int,
        init: tuple[int, float, float],
        optimizer: dict[str, Any],
        policy: dict[str, Any],
    ) -> None: ...
    @property
    def state_floats(self) -> int: ...
    def initial(self, keys: NDArray[np.uint64]) -> NDArray[np.float32]:
        """(n, dim): the rows of keys without a push."""

    def initial_state(self, weights: NDArray[np.float32]) -> NDArray[np.float32]:
        """(rows, state_floats): the state that rows of these weights, (rows, dim), have before their first update."""

    def apply(
        self,
        blocks: Sequence[tuple[NDArray[np.uint64], NDArray[np.float32]]],
        *,
        workers: int,
        grad_sum: bool,
        lr: float,
        weights: NDArray[np.float32],
        state: NDArray[np.float32],
        update_counts: NDArray[np.uint32],
    ) -> None:
        """Applies one step in place; blocks are (numbers of rows, gradients) of each worker in rank order."""

def seal_rows(grads: NDArray[np.float32], *, scale: float, clip_row_norm: float) -> tuple[int, int, int]:
    """Multiplies (n, dim) by ``scale`` and shortens long rows in place.

    Returns (rows with NaN or Inf, the first of them, rows that were shortened).
    """

class PlannedIds:
    """Which parts of a batch reach which lookups.

    Args:
        parts: (binding, index of the batch tensor, "whole", "select" or "narrow", dimension, start, length) of each.
    """

    def __init__(self, parts: Sequence[tuple[str, int, str, int, int, int]]) -> None: ...
    @property
    def size(self) -> int: ...

class LookupTrace:
    """Lookups of a session as long as it is held."""

    @property
    def lookups(self) -> list[tuple[str, int, tuple[int, ...], tuple[int, ...], int]]:
        """(binding, address of the ids, sizes, strides, bytes per item) of each lookup."""

class NativeSession:
    """cpp_ext/session/session.h."""

    def __init__(
        self,
        shards: RowReader,
        *,
        first_step: int,
        first_sequence: int,
        clocked: bool,
        grad_sum: bool,
        deadline_ms: int,
        cache_bytes: int = 0,
        cache_staleness: int = 0,
        cache_exact: bool = True,
        cache_dtype: str = "float32",
        no_grad_bytes: int = ...,
        no_grad_ms: int = 0,
    ) -> None: ...
    @property
    def shard_count(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def staged_calls(self) -> int: ...
    def count_staged(self) -> None:
        """Counts a backward whose gradients are on a device and are staged at the end of the step."""

    @property
    def lookups_missed(self) -> int: ...
    @property
    def is_prepared(self) -> bool: ...
    def bind(
        self,
        name: str,
        *,
        table_id: int,
        schema_version: int,
        dim: int,
        num_rows: int,
        lr: float,
        cached: bool = True,
        frozen: bool = False,
    ) -> None: ...
    def set_lr(self, name: str, lr: float) -> None: ...
    def set_frozen(self, name: str, frozen: bool) -> None: ...
    def start_trace(self) -> LookupTrace: ...
    def record_pulls(self) -> None: ...
    def take_pull_spans(self) -> list[tuple[int, int, int, int]]:
        """(begin and end by ``time.perf_counter_ns``, step, the operating system's thread id) of pulls since then."""

    def pull_merged(
        self, plan: PlannedIds, roots: Sequence[_BatchTensor], train: bool, *, with_gradient: bool = True
    ) -> None: ...
    def count_missed(self, counts: bool) -> None:
        """Says whether a lookup of this step that pulls from now on counts as missed, as after ``pull_merged``."""

    def pack_merged(self, plan: PlannedIds, roots: Sequence[_BatchTensor], train: bool) -> LookupPack:
        """The rows of the plan's lookups for a device; after ``pull_merged``."""

    def refuse_lookups(self, text: str) -> None:
        """Lookups with gradient fail with this text until the step ends."""

    @property
    def lookup_refusal(self) -> str:
        """That text; "" where there is none."""

    @property
    def is_closed(self) -> bool: ...
    def drop_gradients(self) -> None: ...
    @property
    def rows_in_step(self) -> tuple[int, int]:
        """Rows that the open step keeps here: with gradient, and without."""

    def end_evaluation(self) -> None: ...
    def seal(self, scale: float, *, clip_row_norm: float = ...) -> tuple[int, int, str, int]:
        """(rows, rows with NaN or Inf, the first such table, its key)."""

    def prepare(self) -> None: ...
    def commit_prepared(self) -> None: ...
    def begin_commit(self) -> None: ...
    def finish_commit(self) -> None: ...
    def commit(self) -> None: ...
    def abort(self) -> None: ...
    def reopen(self) -> None: ...
    def check_usable(self) -> None: ...
    def skip_to(self, step: int) -> None: ...
    def stats(self) -> dict[str, int]: ...
    def close(self) -> None: ...

class NativeRowCache:
    """cpp_ext/session/row_cache.h for one dim."""

    def __init__(self, *, capacity_bytes: int, dim: int, dtype: str = "float32") -> None: ...
    @property
    def sets(self) -> int: ...
    @staticmethod
    def bytes_per_row(dim: int, dtype: str = "float32") -> int: ...
    def probe(
        self, table_id: int, keys: NDArray[np.uint64], oldest: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint64], NDArray[np.float32]]:
        """(n) found: 0 miss, 1 stale, 2 hit; (n) versions; (n, dim) rows, those of misses unspecified."""

    def put(
        self,
        table_id: int,
        keys: NDArray[np.uint64],
        versions: NDArray[np.uint64],
        rows: NDArray[np.float32],
        validated: int,
    ) -> None: ...
    def drop(self, table_id: int, keys: NDArray[np.uint64]) -> None: ...

class PrefetchedBatch:
    """Unique rows of one batch, of all tables."""

    @property
    def rows(self) -> int: ...

class Prefetcher:
    """cpp_ext/session/prefetcher.h. threads: how many ``index`` may use, each for other tables."""

    def __init__(self, session: NativeSession, *, exact: bool, threads: int) -> None: ...
    def index(self, plan: PlannedIds, roots: Sequence[_BatchTensor]) -> PrefetchedBatch: ...
    def hint(self, batch: PrefetchedBatch) -> None:
        """Sends the shards the keys that will be pulled; call before ``pull``. What comes of it is not reported."""

    def pull(self, batch: PrefetchedBatch, step: int) -> None: ...
    def pack(
        self, batch: PrefetchedBatch, plan: PlannedIds, roots: Sequence[_BatchTensor]
    ) -> tuple[LookupPack, list[int]]:
        """The batch's rows for a device, and which of the plan's lookups each part of the pack is; after ``pull``."""

    def hand_over(self, batch: PrefetchedBatch, *, with_gradient: bool = True, pack: LookupPack | None = None) -> int:
        """Returns how many rows the pull ahead had left to this call, which has pulled them."""

class LookupPack:
    """cpp_ext/session/lookup_pack.h.

    Args:
        lookups: (binding, ids). The host's address of ids is that of contiguous int64; sizes, strides and item bytes
            are those of the tensor that the op sees.
    """

    def __init__(
        self, lookups: Sequence[tuple[str, _BatchTensor]], *, train: bool, with_gradient: bool = True
    ) -> None: ...
    @property
    def bytes(self) -> int: ...
    @property
    def floats_of_sums(self) -> int: ...
    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """(unique rows, dim, first byte of the rows or of the plan) of all groups of one width."""

    @property
    def groups(self) -> list[tuple[int, int, int]]:
        """(run, first of its rows in the run, unique rows)."""

    @property
    def tables(self) -> list[str]:
        """The binding of each group."""

    @property
    def paddings(self) -> list[int]:
        """The id that lookups of each group leave out; negative: none."""

    def set_paddings(self, of_tables: Sequence[int]) -> None:
        """Sets ``paddings``; before ``write``."""

    @property
    def layout_begin(self) -> int:
        """The first byte of (3, parts) int32: first ids in the run, numbers of ids, positions of padding ids."""

    def order_ids(self) -> None:
        """Has ``write`` say which ids each row has; before ``bytes`` is read."""

    @property
    def orders(self) -> list[tuple[int, int, int]]:
        """(ids, first byte of (rows + 1) int32, first byte of (ids) int32) of each run, after ``order_ids``."""

    @property
    def parts(self) -> list[tuple[int, int, int]]:
        """(group, number of ids, first byte of the positions in the group's run)."""

    def write(self, to: int) -> None: ...
    def find(self, lookups: Sequence[tuple[str, _BatchTensor]]) -> list[int]:
        """The part that has the ids of each (binding, ids); -1 when there is none."""

    def position_of(self, part: int, id: int) -> int: ...  # noqa: A002 - the native name
    @property
    def fresh(self) -> tuple[list[tuple[int, int, int, int]], int]:
        """((run, first byte of the places, first byte of the rows, number of rows), bytes of all)."""

    def write_fresh(self, to: int) -> None: ...
    def stage(self, parts: Sequence[tuple[int, int]], sums: int) -> None:
        """Adds sums to the step. parts: (part, its padding_idx or -1). sums: address of (floats_of_sums) float32."""

class TableAccess:
    """cpp_ext/session/table_access.h. keys (n) uint64; rows and grads (n, dim) float32."""

    def __init__(self, session: NativeSession, *, name: str, table_id: int, schema_version: int, dim: int) -> None: ...
    def pull(self, keys: NDArray[np.uint64]) -> NDArray[np.float32]: ...
    def push(self, keys: NDArray[np.uint64], grads: NDArray[np.float32], lr: float) -> None: ...
    def assign(self, keys: NDArray[np.uint64], rows: NDArray[np.float32]) -> None: ...
    def erase(self, keys: NDArray[np.uint64]) -> int: ...
    def scan(self, shard: int, cursor: int, max_rows: int) -> tuple[NDArray[np.uint64], NDArray[np.float32], int]: ...

class LookupShards(RowReader):
    """The shards of a served model, for a session that only reads."""

class CachedLookups(RowReader):
    """Those shards with a cache of rows in this process (cpp_ext/session/cached_lookups.h).

    Args:
        tables: (id, dim) of those to be cached.
        capacity_bytes: of all of them.
        ttl_ms: how long a row is used after it was asked for; >= 1.

    Raises:
        InvalidArgument: ``capacity_bytes`` is too little (says the least), or ``ttl_ms`` is below 1.
    """

    def __init__(
        self, shards: LookupShards, tables: Sequence[tuple[int, int]], *, capacity_bytes: int, ttl_ms: int
    ) -> None: ...
    def stats(self) -> dict[str, int]:
        """``hits`` and ``misses``, in rows."""

class LookupClient:
    """Lookups in the shards of a serving process group; connects to a shard when it is first asked. Thread-safe.

    Args:
        shards: (host, port), by shard index.
        slot_owner: (slot_count) shard index of each slot.
        route_epoch: of ``slot_owner``.
        cluster_id: 0 accepts any.
        connect_timeout_ms: of each attempt to connect.
        tls: (authorities, own certificate or "", its key or "") in PEM; None: plain TCP.
        token: shown to the shards; "": none.
        transport: as of :class:`Client`.

    Raises:
        InvalidArgument: an argument is out of its range.
    """

    def __init__(
        self,
        *,
        shards: Sequence[tuple[str, int]],
        slot_owner: NDArray[np.uint16],
        route_epoch: int,
        cluster_id: int = 0,
        connect_timeout_ms: int = 5000,
        tls: tuple[str, str, str] | None = None,
        token: str = "",
        transport: Literal["auto", "tcp", "shm"] = "auto",
    ) -> None: ...
    def shards(self, model: int) -> LookupShards:
        """For a session whose ops read the model of this handle."""

    def lookup(
        self,
        model: int,
        tables: Sequence[tuple[int, int, int, NDArray[np.uint64]]],
        *,
        deadline_ms: int,
        routing_key: int = 0,
    ) -> tuple[
        list[tuple[NDArray[np.float32], NDArray[np.uint64], NDArray[np.bool_], NDArray[np.bool_]]],
        list[tuple[int, int, str] | None],
    ]:
        """Rows of several tables, given as (id, schema version, dim, keys (n)).

        Returns:
            For each table rows (n, dim), zeros where not answered; versions (n); found (n), False where the row is the
            table's default; and answered (n). And for each shard None, when it has none of the keys, or (number of the
            version that answered, code of its error or 0, message).

        Raises:
            InvalidArgument: a dim or deadline is out of range.
        """
