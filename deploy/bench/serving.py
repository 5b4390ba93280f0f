"""``bench serving``: measures lookups against raw TCP and Redis, loading, swaps, and live sync under load.

A version of ``rows`` rows x 64 float32 is written as files and served by one process. Raw TCP sends as many bytes in
each direction. Redis, where ``redis-server`` is installed, has the same rows as strings of 256 bytes
(serving_saturation.py). Then live sync runs beside a training job (serving_sync.py).
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from ...cpp_ext import _server
from ...proto import serving_pb2 as pb, serving_pb2_grpc as pb_grpc
from ...proto.checkpoint.tensor_file import Tensor
from ...proto.optim import SGD
from ...proto.published.manifest import MANIFEST, SLOTS, ModelManifest, PublishedTable, ServedDtype
from ...proto.published.model_names import handle_of
from ...proto.published.registry import ModelRegistry
from ...proto.published.row_parts import write_rows, write_tensors
from ...proto.schema import TableSchema
from ...proto.transport import Transport
from ...serving.client.client import ServingClient
from ...serving.client.shard_assignment import ShardAssignment
from ...serving.loaded_version import load_version
from ..launch.local_serving import LocalServing, local_serving
from . import click_model
from .harness import Contender, Figure, latency_figure, median, time_in_turns
from .processes import FRAME_BYTES, raw_tcp
from .serving_saturation import TABLE_ID, Size, connection_to, saturation
from .serving_sync import live_sync

_SLOT_COUNT = 16_384


FULL = Size()
QUICK = Size(
    table_rows=20_000,
    repetitions=100,
    saturation_sec=0.5,
    trial_sec=0.2,
    batches=(250, 1_000),
    depths=(1, 2),
    threads=2,
    sync_sec=1.0,
    sync_turns=1,
    train=click_model.QUICK,
)


def run_serving(size: Size) -> Iterator[Figure]:
    """Yields the figures of latency, saturation, gRPC, loading, int8 rows, swaps, freshness and live sync, as they
    come.
    """
    with tempfile.TemporaryDirectory(prefix="sparserow-bench-") as root:
        rows = np.random.default_rng(1).standard_normal((size.table_rows, size.dim)).astype(np.float32)
        registry = ModelRegistry(root)
        for dtype in ("float32", "int8", "float32"):
            write_version(registry, rows, dtype)
        yield from _loading(registry, size)
        yield from _int8(registry, rows)
        registry.point("bench", "live", 1)
        with (
            local_serving("bench", root=root, poll="50ms") as serving,
            ServingClient(serving.addresses, refresh_sec=0.05, connections=size.threads) as client,
        ):
            yield from _latency(client, serving, size)
            yield from saturation(client, serving, rows, size)
            yield from _swaps(registry, client, size)
    yield from live_sync(size)


def write_version(registry: ModelRegistry, rows: np.ndarray[Any, Any], dtype: ServedDtype) -> None:
    """Writes a version of the model ``bench`` with keys 0 to n - 1 of ``rows`` (n, dim) float32, as ``dtype``."""
    version = registry.claim_version("bench")
    folder = registry.folder("bench", version)
    keys = _in_slot_order(np.arange(len(rows), dtype=np.uint64))
    rows = rows[keys.astype(np.int64)]
    versions = np.full(len(rows), (1 << 48) + 1, np.uint64)
    part_rows = 1 << 18
    slices = [slice(at, at + part_rows) for at in range(0, len(rows), part_rows)]
    parts = tuple(
        write_rows(folder, f"rows.0.0.{i}.safetensors", dtype, keys[part], versions[part], rows[part])
        for i, part in enumerate(slices)
    )
    schema = TableSchema("bench", "rows", rows.shape[1], SGD(), id=TABLE_ID)
    slots = write_tensors(folder, SLOTS, {"version": Tensor("U64", np.full(_SLOT_COUNT, 1 << 48, np.uint64))})
    table = PublishedTable(schema, dtype, parts)
    manifest = ModelManifest("bench", version, "2026-01-01T00:00:00+00:00", 1, _SLOT_COUNT, "bench", (table,), slots)
    folder.put(MANIFEST, manifest.to_json())


def _in_slot_order(keys: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns keys in the order in which a scan of a store returns them, and ``publish`` writes them."""
    slots = _server.slots_of(TABLE_ID, keys, _SLOT_COUNT)
    return keys[np.lexsort((slots // 64, slots % 64))]


def _loading(registry: ModelRegistry, size: Size) -> list[Figure]:
    manifest = registry.manifest("bench", 1)
    folder = registry.folder("bench", 1)
    paths = [Path(folder.url) / part.file for table in manifest.tables for part in table.parts]

    def read(_: object) -> None:
        for path in paths:
            with path.open("rb", buffering=0) as file:
                while file.read(16 << 20):
                    pass

    def forget() -> None:
        """Writes the files to the disk, and drops them from the page cache."""
        for path in paths:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def load(_: object) -> None:
        load_version(registry, manifest, ShardAssignment())

    cold, cold_read, warm, warm_read = time_in_turns(
        [
            Contender("load", forget, load),
            Contender("sequential read", forget, read),
            Contender("load, cached", lambda: None, load),
            Contender("sequential read, cached", lambda: None, read),
        ],
        repetitions=size.loads,
        warm_up=1,
    )
    megabytes = sum(path.stat().st_size for path in paths) / 1e6
    name = f"load a version of {size.table_rows:,} x {size.dim}"
    return [
        Figure(f"{name}, from the disk", megabytes / median(cold), "MB/s", 0.5, median(cold_read) / median(cold)),
        Figure("sequential read of the same files, from the disk", megabytes / median(cold_read), "MB/s"),
        Figure(f"{name}, from the page cache", megabytes / median(warm), "MB/s"),
        Figure("sequential read of the same files, from the page cache", megabytes / median(warm_read), "MB/s"),
    ]


def _int8(registry: ModelRegistry, rows: np.ndarray[Any, Any]) -> list[Figure]:
    loaded = load_version(registry, registry.manifest("bench", 2), ShardAssignment())
    sample = np.arange(min(10_000, len(rows)), dtype=np.uint64)
    got = loaded.store.pull(TABLE_ID, sample)[0]
    error = np.abs(np.asarray(got, np.float32) - rows[: len(sample)]).max() / np.abs(rows[: len(sample)]).max()
    stats = loaded.store.stats()[0]
    return [
        Figure("int8 rows: bytes per row in memory", stats.total_bytes / stats.rows, "bytes", higher_is_better=False),
        Figure("int8 rows: largest error against the largest weight", float(error), "", higher_is_better=False),
    ]


def _latency(client: ServingClient, serving: LocalServing, size: Size) -> list[Figure]:
    random = np.random.default_rng(7)
    reply_bytes = FRAME_BYTES + (4 * size.dim + 8 + 1) * size.keys  # rows, versions, found
    request_bytes = FRAME_BYTES + 8 * size.keys

    def fresh_keys() -> Any:
        return random.integers(0, size.table_rows, size.keys).astype(np.uint64)

    with raw_tcp(request_bytes + reply_bytes) as raw, grpc.insecure_channel(serving.addresses[0]) as channel:
        stub = pb_grpc.ServingStub(channel)

        def ask(keys: Any) -> None:
            table = pb.TableKeys(table="rows", packed_keys=keys.tobytes())
            stub.Lookup(pb.LookupRequest(model="bench", tables=[table]), timeout=10)

        handle = handle_of("bench", client.version)

        def lookup(transport: Transport) -> Contender:
            connection = connection_to(serving, transport)
            return Contender(
                transport,
                fresh_keys,
                lambda keys: connection.lookup(handle, [(TABLE_ID, 1, size.dim, keys)], deadline_ms=10_000),
            )

        over_tcp, ours, reference, full, over_grpc = time_in_turns(
            [
                lookup("tcp"),
                lookup("shm"),
                Contender("raw TCP", lambda: None, lambda _: raw.exchange(request_bytes, reply_bytes)),
                Contender("ServingClient", fresh_keys, lambda keys: client.lookup("rows", keys)),
                Contender("gRPC", fresh_keys, ask),
            ],
            repetitions=size.repetitions,
            warm_up=20,
        )
    name = f"lookup {size.keys} x {size.dim}"
    return [
        latency_figure(f"{name} by TCP p50", median(over_tcp), 3.0, median(over_tcp) / median(reference)),
        latency_figure(f"{name} by TCP p99", float(np.percentile(over_tcp, 99))),
        latency_figure(f"{name} p50", median(ours), 3.0, median(ours) / median(reference)),
        latency_figure(f"{name} p99", float(np.percentile(ours, 99))),
        latency_figure(f"{name}: raw TCP p50", median(reference)),
        latency_figure(f"{name}: by ServingClient p50", median(full)),
        latency_figure(f"{name}: by gRPC p50", median(over_grpc)),
        latency_figure(f"{name}: by gRPC p99", float(np.percentile(over_grpc, 99))),
    ]


def _swaps(registry: ModelRegistry, client: ServingClient, size: Size) -> list[Figure]:
    """Moves an alias to and fro under full load."""
    failed: list[BaseException] = []
    done: list[int] = []
    stop = threading.Event()

    def look_up(seed: int) -> None:
        random, count = np.random.default_rng(seed), 0
        while not stop.is_set():
            try:
                count += not client.lookup("rows", random.integers(0, size.table_rows, 100)).is_partial
            except Exception as error:  # the figure counts errors
                failed.append(error)
        done.append(count)

    threads = [threading.Thread(target=look_up, args=(seed,)) for seed in range(size.threads)]
    for thread in threads:
        thread.start()
    moves = 4
    for move in range(moves):
        wanted = 3 if move % 2 == 0 else 1
        registry.point("bench", "live", wanted)
        deadline = time.monotonic() + 60
        while client.version != wanted and time.monotonic() < deadline:
            time.sleep(0.02)
    stop.set()
    for thread in threads:
        thread.join()
    name = f"failed lookups in {moves} alias switches, of {sum(done) + len(failed):,}"
    return [Figure(name, float(len(failed)), "lookups", limit=0.0, higher_is_better=False)]
