"""Row store and data-plane server of one shard. Calls that touch rows release the GIL."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

HASH_VERSION: int
STALENESS_BOUNDS: list[int]
REQUEST_BOUNDS_US: list[int]
_SnapshotRows: TypeAlias = tuple[
    NDArray[np.uint64],  # keys
    NDArray[np.uint64],  # versions
    NDArray[np.uint32],  # update counts
    NDArray[np.generic],  # weights
    NDArray[np.float32],  # state
    NDArray[np.uint32],  # steps since the last push
    NDArray[np.uint32],  # unix seconds of it
    int,
    int,
]
NOT_FOLLOWED: int  # in a cursor's versions: the follower does not want this slot

def set_error_factory(factory: Callable[[int, str], BaseException]) -> None:
    """Registers how a native error (number of its code, message) becomes an exception."""

def row_hash(table_id: int, key: int) -> int:
    """The 64-bit hash that decides slot and stripe of a row."""

def slot_of(hash: int, slot_count: int = 16384) -> int:  # noqa: A002
    """The slot of a row hash. Raises InvalidArgument unless ``slot_count`` is a power of two in [2, 65536]."""

def slots_of(table_id: int, keys: NDArray[np.uint64], slot_count: int) -> NDArray[np.uint32]:
    """The slot of each key (n) of a table. Raises InvalidArgument as ``slot_of``."""

def make_authority(name: str, valid_sec: int) -> tuple[str, str]:
    """A certificate that signs itself and may sign others, and its key, in PEM."""

def sign_certificate(
    authority: tuple[str, str], name: str, names: str, *, begins_sec: int = -60, valid_sec: int
) -> tuple[str, str]:
    """A certificate and its key in PEM, for servers and clients.

    Args:
        authority: its certificate and key.
        name: of the subject.
        names: such as ``DNS:ps-0.ps,IP:10.0.0.1``.
        begins_sec: when it becomes valid, after now.
        valid_sec: for how long from then on.

    Raises:
        InvalidArgument: says what is at fault.
    """

def certificate_facts(certificate: str) -> tuple[str, str, str]:
    """When the first certificate of a text begins and ends, and its subject.

    Raises:
        InvalidArgument: there is none.
    """

def routes_to_canary(routing_key: int, share: float) -> bool:
    """Whether a routing key, which is not 0, belongs to the share [0, 1] of keys that a canary answers."""

def id_of_name(name: str, /) -> int:
    """32-bit table id of ``namespace/name``; never 0."""

class InitSpec:
    """Initial rows: constant a; uniform [a, b); normal mean a, std b; xavier_*: gain a, b rows."""

    def __init__(
        self,
        *,
        kind: Literal["constant", "uniform", "normal", "xavier_uniform", "xavier_normal"] = "constant",
        a: float = 0.0,
        b: float = 0.0,
    ) -> None: ...
    @property
    def kind(self) -> str: ...
    @property
    def a(self) -> float: ...
    @property
    def b(self) -> float: ...

class OptimizerSpec:
    """Hyper-parameters; fields that ``kind`` does not use must keep their defaults."""

    def __init__(
        self,
        *,
        kind: Literal[
            "sgd", "adagrad", "rowwise_adagrad", "adam", "rmsprop", "adadelta", "lion", "lamb", "ftrl"
        ] = "sgd",
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        eps: float = 1e-10,
        initial_accumulator: float = 0.0,
        accumulator_decay: float = 1.0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        amsgrad: bool = False,
        alpha: float = 0.99,
        centered: bool = False,
        rho: float = 0.9,
        beta: float = 1.0,
        l1: float = 0.0,
        l2: float = 0.0,
        group_lasso: float = 0.0,
    ) -> None: ...
    @property
    def kind(self) -> str: ...
    @property
    def momentum(self) -> float: ...
    @property
    def dampening(self) -> float: ...
    @property
    def nesterov(self) -> bool: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def decoupled(self) -> bool: ...
    @property
    def eps(self) -> float: ...
    @property
    def initial_accumulator(self) -> float: ...
    @property
    def accumulator_decay(self) -> float: ...
    @property
    def beta1(self) -> float: ...
    @property
    def beta2(self) -> float: ...
    @property
    def amsgrad(self) -> bool: ...
    @property
    def alpha(self) -> float: ...
    @property
    def centered(self) -> bool: ...
    @property
    def rho(self) -> float: ...
    @property
    def beta(self) -> float: ...
    @property
    def l1(self) -> float: ...
    @property
    def l2(self) -> float: ...
    @property
    def group_lasso(self) -> float: ...

class TableSchema:
    """What a table is. ``name`` is ``namespace/name``, ``id`` is ``id_of_name(name)``."""

    def __init__(
        self,
        *,
        id: int,  # noqa: A002
        name: str,
        dim: int,
        version: int = 1,
        dtype: Literal["float32", "bfloat16", "float16", "int8"] = "float32",  # int8: read, never trained
        seed: int = 0,
        init: InitSpec = ...,
        optimizer: OptimizerSpec = ...,
        policy: dict[str, Any] = ...,
    ) -> None: ...
    @property
    def id(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def init(self) -> InitSpec: ...
    @property
    def optimizer(self) -> OptimizerSpec: ...
    @property
    def has_filter(self) -> bool:
        """Whether the table counts keys that have no row."""

class TableStats:
    """Rows of a table, their bytes (weights and state alone; memory as allocated), and what is on the SSD alone."""

    @property
    def table_id(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def ssd_rows(self) -> int: ...
    @property
    def ssd_bytes(self) -> int: ...
    @property
    def rows_added(self) -> int:
        """Rows that were not there before, since the start, by pushes and as stored rows."""

    @property
    def rows_evicted(self) -> int:
        """Rows that left memory for the SSD, since the start."""

    @property
    def refused(self) -> int:
        """Pushes of keys that the table's policy gave no row for them."""

    @property
    def filter_entries(self) -> int: ...
    @property
    def filter_bytes(self) -> int: ...
    @property
    def filter_error_rate(self) -> float:
        """Estimate: how likely the filter takes a new key for another one."""

    @property
    def sweeps(self) -> int: ...
    @property
    def swept_rows(self) -> list[int]:
        """By rule: age in steps, age in seconds, norm, bound."""

    @property
    def ages_steps(self) -> list[int]:
        """Rows by the steps since their last push, as the last whole sweep saw them; entry i has ages of i bits."""

    @property
    def ages_seconds(self) -> list[int]: ...
    @property
    def sweep_longest_hold_seconds(self) -> float: ...
    @property
    def sweep_longest_hold_cpu_seconds(self) -> float:
        """Of the thread that swept; the wall time above has also what it waited for a CPU."""

class SweepFreed:
    """What one rule freed: rows, and their bytes of weights and state."""

    @property
    def rows(self) -> int: ...
    @property
    def bytes(self) -> int: ...

class SweepReport:
    """What a sweep did, or in a dry run would do; ``freed`` is by rule as ``TableStats.swept_rows``."""

    @property
    def rows_seen(self) -> int: ...
    @property
    def freed(self) -> list[SweepFreed]: ...
    @property
    def slices(self) -> int: ...
    @property
    def longest_hold_seconds(self) -> float: ...
    @property
    def longest_hold_cpu_seconds(self) -> float: ...
    @property
    def is_complete(self) -> bool: ...

class Store:
    """The row store of one shard. Thread-safe.

    Args:
        memory_budget_bytes: of rows and indexes; 0 is no budget.
        slot_count: a power of two in [2, 65536], the cluster's.
        lineage: high 16 bits of every version that this store gives.
        ssd_path: folder for rows beyond the budget, which must not be 0 then; "": memory alone. It is emptied, or
            refused when it is not this shard's (InvalidArgument) or in use (FailedPrecondition).
        ssd_bytes: of files in it; 0 is what the disk has. ``pages`` needs 8 MiB.
        ssd_engine: ``pages`` or ``rocksdb``, which is refused (FailedPrecondition) in a build without it.
        ssd_direct_io: whether ``pages`` reads and writes past the system's cache; ``rocksdb`` refuses it
            (InvalidArgument), and so does a file system without direct I/O (FailedPrecondition).
        cluster_id, shard: whose the folder is.
        change_log_bytes: of what followers have not taken yet; nothing is kept while there is no cursor.
    """

    def __init__(
        self,
        *,
        memory_budget_bytes: int = 0,
        slot_count: int = 16384,
        lineage: int = 1,
        ssd_path: str = "",
        ssd_bytes: int = 0,
        cluster_id: int = 0,
        shard: int = 0,
        change_log_bytes: int = 67108864,
        ssd_engine: str = "pages",
        ssd_direct_io: bool = False,
    ) -> None: ...
    @property
    def memory_budget_bytes(self) -> int: ...
    @property
    def slot_count(self) -> int: ...
    @property
    def lineage(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def reserved_bytes(self) -> int:
        """The bytes of pages that were touched ahead and that no row has used; whole arenas of them go first."""

    @property
    def is_reserve_filling(self) -> bool:
        """Whether pages are being touched ahead now."""

    def create_table(self, schema: TableSchema) -> None:
        """Idempotent. Raises InvalidArgument (a field), FailedPrecondition (another schema exists)."""

    def drop_table(self, table_id: int) -> None:
        """Gives the table's memory back. Raises NotFound."""

    def schema(self, table_id: int) -> TableSchema | None: ...
    def pull(
        self,
        table_id: int,
        keys: NDArray[np.uint64],
        *,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    ) -> tuple[NDArray[np.generic], NDArray[np.uint64], NDArray[np.bool_]]:
        """Rows (n, dim), versions (n) and found (n) in the order of ``keys`` (n). bfloat16 comes as uint16 bits.

        An absent row reads as its initial row, version 0. Raises NotFound, InvalidArgument.
        """

    def pull_into(self, table_id: int, keys: NDArray[np.uint64], out: NDArray[np.float32]) -> None:
        """As ``pull`` in float32, into ``out`` (n, dim), C-contiguous. Raises NotFound, InvalidArgument."""

    def apply(
        self,
        table_id: int,
        keys: NDArray[np.uint64],
        grads: NDArray[np.float32],
        *,
        lr: float,
        grad_scale: float = 1.0,
        job: int = 0,
        step: int = -1,
    ) -> None:
        """Applies grads (n, dim) in order; ``step`` of ``job`` moves the table's clock, -1 does not.

        Raises NotFound, InvalidArgument, ResourceExhausted (nothing applied).
        """

    def assign(self, table_id: int, keys: NDArray[np.uint64], rows: NDArray[np.float32]) -> None:
        """Sets weights (n, dim), creating rows. Raises as ``apply``."""

    def erase(self, table_id: int, keys: NDArray[np.uint64]) -> int:
        """Removes rows; returns how many existed. Raises NotFound, InvalidArgument."""

    def scan(
        self, table_id: int, *, cursor: int = 0, max_rows: int = 65536, with_state: bool = False
    ) -> tuple[
        NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32], NDArray[np.float32], NDArray[np.float32], int
    ]:
        """A page: keys, versions, update counts, rows (n, dim), state (n, state floats or 0), next cursor (0: end)."""

    def sweep(
        self,
        table_id: int,
        *,
        dry_run: bool = False,
        share: float = 1.0,
        pause_ratio: float = 0.0,
        by_seconds: bool = True,
    ) -> SweepReport:
        """Removes the rows that the table's policy no longer wants; in a dry run counts them.

        Args:
            share: of the table's slots that this store has: its part of max_rows and max_bytes.
            pause_ratio: how long it sleeps between slices, as a multiple of the CPU time that they took.
            by_seconds: False leaves rows alone whose age in seconds alone would remove them.

        Raises:
            NotFound: there is no such table.
            DataLoss: the SSD lost rows of it.
        """

    def stop_sweeps(self) -> None:
        """Ends sweeps under way, soon, and lets later ones end at once."""

    def filter_image(self, table_id: int, slot: int) -> NDArray[np.uint64]:
        """What a slot remembers of keys without a row. Raises NotFound, FailedPrecondition (it remembers none)."""

    def load_filter(self, table_id: int, slot: int, image: NDArray[np.uint64]) -> None:
        """Puts a ``filter_image`` back. Raises as it, and DataLoss."""

    def fetch_to_memory(self, table_id: int, keys: NDArray[np.uint64]) -> None:
        """Brings rows from the SSD to memory, as far as colder rows make room. Raises NotFound, DataLoss."""

    def write_back(self) -> None:
        """Writes every row that the SSD does not have to it; all stay in memory.

        Raises:
            FailedPrecondition: there is no SSD.
            ResourceExhausted: it is full.
        """

    def snapshot(
        self, *, side_budget_bytes: int = 0, longest_stall_ms: int = 10000, since: NDArray[np.uint64] | None = None
    ) -> Snapshot:
        """The rows of this moment, handed out while writes go on. No write may be under way; ``Server.cut`` sees to it.

        Args:
            side_budget_bytes: of images of rows that change before they are handed out; 0 is a tenth of what rows take.
                When it is full, writes wait.
            longest_stall_ms: without a slot handed out while writes wait; then the snapshot is given up.
            since: (slot_count) versions: only rows that changed after them; a slot from which rows were erased since
                comes whole.

        Raises:
            FailedPrecondition: there is one already.
        """

    def install(
        self,
        table_id: int,
        keys: NDArray[np.uint64],
        versions: NDArray[np.uint64],
        update_counts: NDArray[np.uint32],
        weights: NDArray[np.generic],
        state: NDArray[np.float32],
        age_steps: NDArray[np.uint32] = ...,
        push_seconds: NDArray[np.uint32] = ...,
    ) -> None:
        """Puts rows as a snapshot gave them; empty ``state``: initial; empty ages: pushed to now.

        Raises NotFound, as ``apply``.
        """

    def set_sequences(self, slots: NDArray[np.uint32], sequences: NDArray[np.uint64]) -> None:
        """The last sequence given in each of these slots."""

    def set_lineage(self, lineage: int) -> None:
        """Of the versions given from now on."""

    def tier_stats(self) -> dict[str, int | float] | None:
        """Counters since the start, None without an SSD.

        hits, misses: keys of pulls and commits; brought_ahead: keys of hints; rows_evicted, evicted_ahead of them
        before anybody needed their room; longest_hold_seconds of rows that pulls wait for while others leave or come
        back, and longest_hold_cpu_seconds; ssd_rows_read, ssd_rows_absent, ssd_rows_written; ssd_bytes_read and
        ssd_bytes_written of rows, ssd_disk_bytes_read of all that no cache had; ssd_reads and ssd_writes: batches,
        with ssd_read_seconds and ssd_write_seconds of all of them; and as they are now ssd_file_bytes on the disk,
        ssd_memory_bytes of filters, indexes and buffers, ssd_background_jobs: flushes and compactions that run or are
        wanted, resident_bytes of the arenas that rows and their indexes in memory lie in, used or not, and
        is_making_room: whether rows leave ahead, or are about to.
        """

    def stats(self, table_ids: Sequence[int] = ()) -> list[TableStats]:
        """Of these tables, as far as they exist; of all when none is named."""

    def set_memory_shares(self, shares: dict[str, float]) -> None:
        """Sets the shares of the memory budget that namespaces have for themselves.

        Raises:
            InvalidArgument: a share is not above 0, or all together are more than 0.875.
        """
    def change_versions(self) -> NDArray[np.uint64]:
        """(slot_count) version of each slot now: lineage << 48 | sequence of its last change."""

    def open_cursor(
        self,
        name: str,
        versions: NDArray[np.uint64],
        *,
        tables: Sequence[int] = (),
        idle_sec: int = 0,
        hold_updates: int = 0,
        hold_move: float = 0.0,
        hold_ms: int = 0,
    ) -> None:
        """Changes are kept for this follower from now on; a cursor of the same name begins anew.

        Args:
            versions: (slot_count) up to which the follower has everything of each slot; 0: it has nothing (also of
                another lineage); NOT_FOLLOWED: it does not want the slot.
            tables: ids; empty: all.
            idle_sec: without a call that names the cursor, after which ``close_idle_cursors`` ends it; 0: never.
            hold_updates, hold_move, hold_ms: a changed row waits until it was written so often since it was last sent,
                has moved by more than this L2 distance, or has waited so long (store/changes/send_threshold.h).
                All 0: none waits.

        Raises:
            InvalidArgument: not one version for each slot; ``hold_ms`` without one of the others, or the reverse.
            ResourceExhausted: ``change_log_bytes`` is too small.
        """

    def close_cursor(self, name: str) -> None: ...
    def close_idle_cursors(self) -> None: ...
    def has_cursor(self, name: str) -> bool: ...
    def read_changes(self, name: str, *, begin: int = 0, max_bytes: int) -> tuple[NDArray[np.uint8], int, int, bool]:
        """A page of what the cursor has not got, at most ``max_bytes`` or one row; its format is in
        cpp_ext/store/changes/change_page.h.

        Returns its bytes, how many slots it has (0: the cursor has everything but for what is held back), where the
        next page begins to look, and whether nothing is left. Raises NotFound.
        """

    def ack_changes(self, name: str, slots: NDArray[np.uint32], versions: NDArray[np.uint64], part: int = 0) -> None:
        """The follower has applied ``slots`` up to ``versions``, the positions of a page, and the page's ``part`` of
        a slot. Raises NotFound."""

    def apply_changes(self, page: bytes | memoryview | NDArray[np.uint8]) -> dict[str, Any]:
        """Makes this store's slots as a page of another says; newest wins, a snapshot replaces.

        Rows of tables that the other store does not have (any more) stay.

        Returns:
            ``slots``, ``versions`` (up to which this store has everything now), ``positions`` (to be acknowledged) and
            ``oldest_at_ms`` (of each slot's oldest change, low half of the clock in milliseconds, 0: not known), arrays
            of one length; ``part`` (to be acknowledged: the number of the part of a slot whose last part is still to
            come, 0: there is none); ``rows``, ``unchanged`` and ``erased``; ``tables``, the ids of the tables that the
            other store has, of those that the cursor wants, None where the page has no whole slot; ``applied_tables``,
            the ids of those of which the page has something; ``others``, the dim and schema version of those that the
            other store has with others, by id: their rows here stay.

        Raises:
            DataLoss: the page is damaged; nothing was changed.
        """

    def assign_versions(
        self, table_id: int, keys: NDArray[np.uint64], versions: NDArray[np.uint64], rows: NDArray[np.float32]
    ) -> None:
        """As ``assign``, with the versions (n) that the rows have elsewhere."""

    def row_facts(self, table_id: int, key: int) -> dict[str, int]:
        """What is known of one row: exists, is_in_memory (else, where it exists, on the SSD alone), version,
        update_count, and age_ms since it was last written (-1: not known; it is while changes are followed, or when the
        table's policy goes by seconds). Raises NotFound.
        """

    def change_signal(self) -> int:
        """A descriptor from which 8 bytes can be read once something changed, since :meth:`arm_change_signal`, in a
        table that a cursor follows; it ends with the store. Raises ResourceExhausted."""

    def arm_change_signal(self) -> None:
        """Has the next change show on the descriptor of :meth:`change_signal`, once."""

    def change_stats(self) -> dict[str, int]:
        """cursors; used_bytes of the log; forgotten changes; scans and snapshots of slots; held_rows that wait."""

def step_back(nice: int) -> None:
    """Gives the calling thread more niceness than the process's first thread has and shortens its slices, so that
    threads which wake wait less for its CPU. The system may refuse it, and has slices of one length before Linux 6.12.

    Args:
        nice: how much more, from 0 to 19; the sum is at most 19.
    """

class SavePace:
    """Slows one thread that hashes and writes rows of a snapshot, where that takes CPUs from writers of the store."""

    def begin(self) -> None:
        """What the thread does from now on, up to ``pause``, counts as computing."""

    def pause(self) -> None:
        """Pauses where the thread lost CPUs while rows were written: at most three times what it has computed."""

class Snapshot:
    """A store's rows of one instant. Belongs to one thread; ends with the object, or by ``end``."""

    @property
    def lineage(self) -> int: ...
    @property
    def tables(self) -> list[TableSchema]: ...
    @property
    def slot_versions(self) -> NDArray[np.uint64]:
        """(slot_count) the last version given in each slot."""

    @property
    def whole_slots(self) -> NDArray[np.bool_]:
        """(slot_count) whether a slot comes with all its rows, in place of those of the snapshot before."""

    def next(self, table_id: int, *, max_bytes: int) -> _SnapshotRows:
        """The next rows of a table, at most ``max_bytes``: keys, versions, update counts, weights (n, dim) as stored
        (bfloat16 as uint16 bits), state (n, state floats), steps since the last push and unix seconds of it (each (n),
        or (0) where the policy does not ask for it), first slot, and the first that has not come whole, which is the
        slot count at the end.

        Raises:
            ResourceExhausted: it was given up, as writes waited for too long.
            DataLoss: the SSD lost rows.
        """

    def pace(self) -> SavePace:
        """The pace of a further thread of the dump; it may outlive the snapshot."""

    def page_bytes(self, most: int) -> int:
        """Bytes that a page should have, so that three of them and the images have room in the side budget."""

    def next_images(self, table_id: int, *, max_bytes: int) -> _SnapshotRows:
        """Rows that ``next`` would come to later and then leaves out: those that changed since the cut, when the side
        buffer holds a quarter of its budget or more; else none. As ``next``, by stripe; they are of slots from the
        next one on.

        Raises:
            ResourceExhausted: as ``next``.
        """

    def filter_image(self, table_id: int, slot: int) -> NDArray[np.uint64]:
        """What the slot remembered of keys without a row, for ``Store.load_filter``; empty: nothing."""

    def stats(self) -> dict[str, int]:
        """rows_saved; side_bytes_most: images held at once; writes_stalled: batches that waited."""

    def end(self) -> None:
        """Nothing is saved any more. Idempotent."""

class Server:
    """The data-plane server of one shard: listens and serves from its own threads once made.

    Args:
        store: whose rows it serves.
        host, port: port 0 lets the system choose.
        io_threads: that speak with clients and apply commits.
        max_frame_bytes: of one request or reply.
        inflight_budget_bytes: of request bodies being received or worked on; past it connections are not read.
        reply_budget_bytes: of replies being made or sent; past it replies wait until others are taken.
        kept_budget_bytes: of commits kept for the clock, and as much of waiting pulls; past it they are refused.
        max_connections: past it a token at an address that has fewer than another one takes a seat of its idle ones.
        cluster_id, shard_index: a client that means another cluster or shard is refused.
        default_deadline_ms: of requests that carry none.
        hello_timeout_ms: from the start of a connection to the end of its first frame.
        stall_timeout_ms: without a byte moved in the middle of a frame, before the connection is closed.
        local: whether clients of this host and user are answered in shared memory.
        max_client_connections: from one address; 0: as many as there may be.
        client_inflight_bytes: of request bodies from one address, at least max_frame_bytes; 0: no bound of its own.
        tls: (authorities for clients or "", certificate, key) in PEM; None: plain, and then alone ``local``.
        grants: (SHA-256 of a token, role, namespaces or []) of each token taken; None: whoever reaches the server may
            do everything.
        observe: whether requests are timed and their keys sampled.

    Raises:
        Unavailable: the port is taken (names host:port).
        InvalidArgument: an argument is out of its range.
    """

    def __init__(
        self,
        store: Store,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        io_threads: int = 2,
        max_frame_bytes: int = 1073741824,
        inflight_budget_bytes: int = 4294967296,
        reply_budget_bytes: int = 2147483648,
        kept_budget_bytes: int = 4294967296,
        max_connections: int = 4096,
        cluster_id: int = 0,
        shard_index: int = 0,
        default_deadline_ms: int = 30000,
        hello_timeout_ms: int = 5000,
        stall_timeout_ms: int = 30000,
        local: bool = False,
        max_client_connections: int = 0,
        client_inflight_bytes: int = 0,
        tls: tuple[str, str, str] | None = None,
        grants: Sequence[tuple[bytes, str, Sequence[str]]] | None = None,
        observe: bool = True,
    ) -> None: ...
    def set_tls(self, tls: tuple[str, str, str] | None) -> None:
        """Of connections made from now on.

        Raises:
            InvalidArgument: a text is no certificate or key (says which).
        """

    def set_grants(self, grants: Sequence[tuple[bytes, str, Sequence[str]]] | None) -> None:
        """From the next request on, of connections that are open too.

        Raises:
            InvalidArgument: a grant is not of that form.
        """

    @property
    def port(self) -> int: ...
    def refuse_tables(self, code: int, message: str, table_ids: Sequence[int], *, deadline_ms: int) -> None:
        """Requests for rows of these tables get an error from now on; an empty list ends that.

        It returns when requests that came before have ended; pulls that wait for the clock end with the error.

        Args:
            code, message: of the error; the code is its number in the taxonomy.
            table_ids: those refused; all others are served.
            deadline_ms: for requests that came before.

        Raises:
            DeadlineExceeded: one of them goes on for longer; the tables are refused all the same.
        """

    def set_route(self, route_epoch: int, slot_owner: NDArray[np.uint16]) -> None:
        """Takes a slot map (slot_count) over; requests with another epoch get StaleRoute.

        Raises:
            InvalidArgument: its size is not the store's slot count.
        """

    def set_job(
        self,
        job_id: int,
        name: str,
        staleness: int | None,
        members: Sequence[tuple[int, int, int] | tuple[int, int, int, int, int | None, int, bytes]],
        first_step: int = 0,
        generation: int = 0,
        operation: int = 0,
        quorum: int = 0,
    ) -> None:
        """Creates a job or replaces its members, and takes commits again. ``staleness`` None is asynchronous.

        Args:
            members: (worker id, epoch, rank), or these with (first step, until step or None while it lives, final
                sequence, proof): what one that left has in doubt is applied when it is that sequence, else forgotten.
                The proof is 16 bytes that the worker's connections must show, or b"".
            first_step: steps before it count as done; read when the clock is new.
            generation: another one than before starts a new clock.
            operation: of the coordinator; grows.
            quorum: members of a step, with staleness 0; 0: all workers.

        Raises:
            InvalidArgument: job id 0, a worker named twice, or a quorum with another staleness than 0.
            FailedPrecondition: an older operation than before, or an epoch that goes down.
        """

    def freeze_job(
        self, job_id: int, operation: int, fence: Sequence[tuple[int, int]], lease_ms: int = 0
    ) -> list[tuple[int, int, int, int, int, int, int]]:
        """Takes no new commit of a job until it is set, or ``lease_ms`` (0: never) has passed, and ends the epochs in
        ``fence`` (worker id, epoch).

        Returns:
            (worker id, epoch, highest sequence taken, highest step taken or -1, sequence in doubt or 0, number of
            commits of steps that were taken, number of other writes) per worker.

        Raises:
            FailedPrecondition: the operation is not newer than what was set.
        """

    def cut(
        self,
        store: Store,
        jobs: Sequence[tuple[int, int, int, Sequence[tuple[int, int, int]]]],
        *,
        deadline_ms: int,
        side_budget_bytes: int = 0,
        longest_stall_ms: int = 10000,
        since: NDArray[np.uint64] | None = None,
    ) -> tuple[Snapshot, list[dict[str, Any]]]:
        """Takes rows and windows of one instant, once all that belongs to the cut is applied. ``set_job`` goes on.

        Args:
            store: the server's.
            jobs: held ones: (job id, operation of the hold, step of staleness 0 or -1, (worker id, epoch, sequence) of
                each worker's last commit accepted anywhere).
            deadline_ms: of waiting for commits.
            side_budget_bytes, longest_stall_ms, since: as in ``Store.snapshot``.

        Returns:
            The rows, and for ``install_jobs`` the windows of each job, as plain values.

        Raises:
            DeadlineExceeded: names the worker ids that it waited for.
            Unavailable: a change of members came between.
        """

    def install_jobs(self, jobs: Sequence[dict[str, Any]]) -> None:
        """Windows of a cut, for the workers that the next ``set_job`` of the same generation names."""

    def drop_job(self, job_id: int, operation: int = 0) -> None:
        """Forgets a job; pulls that wait for it get NotFound. Raises NotFound, FailedPrecondition (older operation)."""

    def set_model(
        self,
        handle: int,
        store: Store,
        number: int,
        *,
        canary: Store | None = None,
        canary_number: int = 0,
        canary_share: float = 0.0,
    ) -> None:
        """Answers lookups of a handle (``id_of_name("MODEL@VERSION")`` or of an alias) from ``store`` from now on;
        those under way are ended from what they began with.

        Args:
            number: of the version, in every reply.
            canary: answers the share [0, 1] of routing keys that their hash chooses; None: nothing does.
        """

    def remove_model(self, handle: int) -> None:
        """Lookups of the handle are NotFound from now on."""

    def count_write(self, table_id: int) -> None:
        """To be called when rows of a table were changed or dropped without a frame."""

    def stats(self) -> dict[str, Any]:
        """Counters by name: connections, frames, bytes, rows, commits, parked pulls, measured staleness.

        ``job_steps`` is {job id: highest step that a worker has committed}; ``staleness`` {table id: (pulls by
        bucket, sum of their steps)}, where bucket i holds those of at most ``STALENESS_BOUNDS[i]``, the last the rest.
        ``request_times`` is {kind: (requests by bucket, sum of their seconds)}, bounds: ``REQUEST_BOUNDS_US``. Kinds:
        pull, pull_waited (for the clock, the wait included), lookup, commit, write, scan, other.
        """

    def keep_spans(self, wanted: bool) -> None:
        """Whether requests that carry a trace are kept for ``take_requests``; at first they are not."""

    def take_requests(self) -> tuple[list[dict[str, Any]], int]:
        """Requests since the last call that were refused, or carried a trace while spans are kept; and how many more
        there were than the 4,096 that are kept.

        Each has type, request (id), job, worker, epoch, step (-1: none), peer (address), code (0: answered), message,
        begin_unix_ns, end_unix_ns, trace_id (16 bytes) and span_id (8 bytes) of who asked, zeros without.
        """

    def lost_commits(self) -> list[tuple[int, int, int, bool, int, int]]:
        """Which commits ``commits_lost`` counts: (job id, worker id, epoch, whether of steps, first, last), ascending.

        Steps name commits of steps, sequences all others; ``last`` is inclusive.
        """
    def hot_keys(self, most: int) -> tuple[int, list[tuple[int, int, int, int]]]:
        """The keys that pulls and lookups ask for most: how many were sampled of late (at most 65,536), and by falling
        sure count (table id, key, count, error), where the count is of samples and too high by at most the error.
        """

    def drain(self, deadline_ms: int) -> None:
        """Refuses new requests (Unavailable) and waits for those under way, at most ``deadline_ms``."""

    def stop(self) -> None:
        """Closes all connections and ends the threads."""

def has_rocksdb() -> bool:
    """Whether this build has the SSD engine ``rocksdb``."""

class FileReader:
    """Reads local files whole, by blocks that it hashes while they are in the CPU's cache. Thread-safe.

    A file that the system's cache has is copied from there; any other is read around it where the file system can.
    """

    def __init__(self) -> None: ...
    def read(self, path: str, size: int) -> tuple[NDArray[np.uint8], int, int]:
        """Reads the first ``size`` bytes of a file.

        Returns:
            The bytes, (size) uint8, fewer where the file ended meanwhile, and none where it had another size; the size
            of the file after it was read; the XXH3-64 of the bytes. The memory of the bytes is used for another file
            when the array and its views are gone.

        Raises:
            NotFound: there is no such file.
            ResourceExhausted: there is no memory for it.
            FailedPrecondition: the system refuses to read it.
        """
