"""Data-plane client and session of a worker. Calls that wait or touch rows release the GIL."""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64] | NDArray[np.uint64]

def set_error_factory(factory: Callable[[int, str], BaseException]) -> None:
    """Registers how a native error (number of its code, message) becomes an exception."""

class Shards:
    """What holds a session's rows: the seam that ``Client.shards`` and in-process shards share."""

    @property
    def shard_count(self) -> int: ...

class ClientShards(Shards):
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
    ) -> None: ...
    @property
    def shards(self) -> ClientShards:
        """For a session."""

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
            on_nonfinite: "raise" refuses NaN and Inf (count and first key), nothing is sent.

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
        deadline_ms: int = 30000,
    ) -> None:
        """Sets weights (n, dim), creating rows; of a repeated key the last row stands."""

    def erase(self, table_id: int, keys: Keys, *, deadline_ms: int = 30000) -> int:
        """Removes rows; returns how many existed."""

    def scan(
        self, table_id: int, *, shard: int, max_rows: int = 65536, with_state: bool = False, deadline_ms: int = 30000
    ) -> Scan:
        """Walks one shard's rows in unspecified order; ``deadline_ms`` is of each page."""

    def stats(self) -> dict[str, int]:
        """Counters: frames_sent, bytes_sent, bytes_received, reconnects, retries."""
