"""Yardsticks and loads of the benchmarks, which a wheel is without."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ._client import Client
from ._server import Store

def set_error_factory(factory: Callable[[int, str], BaseException]) -> None:
    """Registers how a native error (number of its code, message) becomes an exception."""

def flat_adagrad(
    rows: NDArray[np.int64],
    grads: NDArray[np.float32],
    weights: NDArray[np.float32],
    sums: NDArray[np.float32],
    *,
    lr: float,
    eps: float,
) -> None:
    """The yardstick of ``bench engine``: Adagrad in place on rows (n) of flat weights and sums (rows, dim)."""

def has_io_uring() -> bool:
    """Whether the kernel allows io_uring to this process."""

class RawSsd:
    """The yardstick of ``bench tiers``: an SSD engine without a store above it.

    Args:
        path: an empty folder.
        row_bytes: of every value.
        engine: ``pages`` or ``rocksdb``.
        direct_io: as ``ssd_direct_io`` of a ``Store``.
        with_uring: whether reads that wait for the disk may go by io_uring; otherwise threads read.
    """

    def __init__(
        self,
        path: str,
        *,
        row_bytes: int,
        engine: str = "pages",
        direct_io: bool = False,
        with_uring: bool = True,
    ) -> None: ...
    def serve(self, reads: NDArray[np.uint64], writes: NDArray[np.uint64], *, are_known: bool) -> int:
        """Reads rows in one batch, writes rows in another; returns how many of the read ones were there.

        ``are_known`` says that every written key has a row already.
        """

    def stats(self) -> dict[str, int]:
        """disk_bytes_read and background_jobs, as ``Store.tier_stats`` has them."""

def open_loop_pulls(
    store: Store, table_id: int, keys: NDArray[np.uint64], due: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The load of ``bench sweeps``: pulls one after another, none before it is due, without the GIL.

    Args:
        keys: (n * batch) of n pulls.
        due: (n) seconds from now, ascending.

    Returns:
        (n) seconds from when each was due to when it was done.

    Raises:
        NotFound, InvalidArgument: no such table; ``keys`` are not n batches.
    """

def empty_commit_seconds(workers: int, steps: int, staleness: int | None) -> float:
    """The load of ``bench scale``: steps of many workers in one commit log, in one thread, without rows and the GIL.

    Args:
        workers: at most 100,000, and no multiple of 7919.
        steps: of each worker, from 2; the first is not counted.
        staleness: of the job, in steps; None: asynchronous.

    Returns:
        Seconds of one commit.

    Raises:
        InvalidArgument: out of range.
    """

def spin_slices(seconds: float, slice_seconds: float, pause_ratio: float) -> dict[str, float]:
    """The reference of ``bench sweeps``: works in slices and sleeps between them as a sweep does, without the GIL, and
    holds nothing.

    Args:
        seconds: how long; the slice that is begun is ended.
        slice_seconds: of each slice, above 0.
        pause_ratio: how long it sleeps after a slice, as a multiple of the CPU time that the slice took.

    Returns:
        ``longest_seconds`` and ``longest_cpu_seconds`` of a slice.

    Raises:
        InvalidArgument: out of range.
    """

class RawTls:
    """The reference of ``bench tls``: one end of an OpenSSL connection, without the GIL while it moves bytes.

    Args:
        fd: of a connected blocking socket, which the caller keeps open.
        certificate, key: in PEM, of the end that accepts; "": the one that connects, which trusts whoever answers.
        largest_bytes: of a message.

    Raises:
        RuntimeError: OpenSSL refuses.
    """

    def __init__(self, fd: int, *, certificate: str = "", key: str = "", largest_bytes: int) -> None: ...
    def exchange(self, request_bytes: int, reply_bytes: int) -> None:
        """Sends ``request_bytes`` (at least 16) and receives ``reply_bytes``."""
    def answer(self) -> None:
        """Answers exchanges until the other end leaves."""

class LeasedRows:
    """The load of ``bench wire``: pulls and pushes as a step of training does them, without the GIL.

    Rows lie in memory of the client, which each call uses again; through shared memory the shard reads and writes it.
    An object belongs to one thread at a time.

    Args:
        client: of the shards that have the table, whose schema has version 1.
        table_id: of the table.
        rows: (n, dim) float32, which are copied: the gradients of pushes until a pull.

    Raises:
        InvalidArgument: ``rows`` are no such matrix.
    """

    def __init__(self, client: Client, table_id: int, rows: NDArray[np.float32]) -> None: ...
    def pull(self, keys: NDArray[np.uint64]) -> None:
        """Pulls the rows of at most n ``keys``."""

    def push(self, keys: NDArray[np.uint64], *, lr: float, sequence: int) -> None:
        """Commits a gradient of at most n ``keys``; ``sequence`` rises from push to push of a client."""
