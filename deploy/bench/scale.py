"""``bench scale``: measures what more shards and workers cost, on one machine.

Two cores cannot show throughput that grows with machines, but they show what each row costs: the CPU-seconds of all
processes, worker and servers, per million rows. If that is the same for 1 shard and for 4, then N machines do N times
the work as far as CPU goes.

* 1, 2 and 4 shards with 1 and 2 workers: real shard processes, real sessions, one table with Adagrad.
* The commit log of a shard, alone: what an empty commit costs by numbers of workers, which share its mutex.
* Many shards: real shard processes with a small table. The workers are stubs in one process: each has a lease and a
native client, but no model and no torch. This shows connections, memory, the slot map and the coordinator's load.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from ...cpp_ext import _bench
from ...proto import control_pb2 as pb, control_pb2_grpc as pb_grpc
from ...proto.control import ControlClient
from ...proto.optim import Adagrad
from ...proto.schema import Constant, RowPolicy, TableSchema
from ...proto.security.channels import SecureChannel
from ...worker.membership.lease import Lease
from ...worker.membership.shard_client import shard_client
from ..launch.local_cluster import LocalCluster, local_cluster
from .harness import Figure, process_cpu, resident_bytes

LIMIT_OF_ONE_SHARD = 1.15
LIMIT_OF_MANY_WORKERS = 3.0  # of a commit, in those of the fewest
MODES = ("pull", "push")
_ANSWER_SEC = 600.0


@dataclass(frozen=True)
class Size:
    """The rows of the table, the keys and rounds of each measurement, and the numbers of shards
    and stubs of the crowd.
    """

    rows: int = 1_000_000
    dim: int = 64
    keys: int = 50_000
    rounds: int = 50
    shards: tuple[int, ...] = (1, 2, 4)
    workers: tuple[int, ...] = (1, 2)
    committers: tuple[int, ...] = (16, 125, 1009, 2003)
    commit_steps: int = 50
    crowd_shards: int = 64
    crowd_workers: int = 16
    crowd_rows: int = 200_000
    crowd_rounds: int = 10
    quiet_sec: float = 20.0


FULL = Size()
QUICK = Size(
    rows=20_000,
    dim=8,
    keys=2_000,
    rounds=5,
    shards=(1, 2),
    workers=(1,),
    committers=(16, 125),
    commit_steps=5,
    crowd_shards=4,
    crowd_workers=3,
    crowd_rows=2_000,
    crowd_rounds=2,
    quiet_sec=2.0,
)


def run_scale(size: Size) -> Iterator[Figure]:
    """Yields CPU-seconds per million rows by shards and workers, and the memory and CPU of many shards."""
    first: dict[tuple[str, int], float] = {}
    for shards in size.shards:
        for workers in size.workers:
            for mode, (worker_sec, server_sec) in _cost(size, shards, workers).items():
                total = worker_sec + server_sec
                one = first.setdefault((mode, workers), total)
                name = f"scale {mode} {size.keys} x {size.dim}, {shards} shards, {workers} workers"
                limit = LIMIT_OF_ONE_SHARD if shards == size.shards[-1] else None
                yield _cpu(f"{name}: CPU, of one shard's", total, limit, total / one)
                yield _cpu(f"{name}: workers' part", worker_sec)
                yield _cpu(f"{name}: servers' part", server_sec)
    yield from _commits(size)
    yield from _crowd(size)


def _cpu(name: str, seconds: float, limit: float | None = None, ratio: float | None = None) -> Figure:
    return Figure(name, seconds, "CPU s/M rows", limit, ratio, higher_is_better=False)


def _commits(size: Size) -> Iterator[Figure]:
    for staleness, kind in ((0, "synchronous"), (2, "staleness 2"), (None, "asynchronous")):
        few = 0.0
        for workers in size.committers:
            microseconds = 1e6 * _bench.empty_commit_seconds(workers, size.commit_steps, staleness)
            few = few or microseconds
            name = f"scale an empty commit, {kind}, {workers} workers, of {size.committers[0]}"
            limit = LIMIT_OF_MANY_WORKERS if workers == size.committers[-1] else None
            yield Figure(name, microseconds, "us", limit, microseconds / few, higher_is_better=False)


# ---- some shards, real sessions


def _cost(size: Size, shards: int, workers: int) -> dict[str, tuple[float, float]]:
    """Returns CPU-seconds per million rows of workers and of servers, by mode."""
    costs = {}
    with local_cluster(shards=shards) as cluster, _team(size, cluster.address, workers) as team:
        _ask_all(team, "fill")
        for mode in MODES:
            _ask_all(team, mode)  # warm-up
            before = _servers_cpu(cluster)
            worker_sec = sum(_ask_all(team, mode))
            server_sec = _servers_cpu(cluster) - before
            millions = workers * size.rounds * size.keys / 1e6
            costs[mode] = (worker_sec / millions, server_sec / millions)
    return costs


def _servers_cpu(cluster: LocalCluster) -> float:
    return sum(process_cpu(pid) for pid in cluster.shard_pids)


@contextmanager
def _team(size: Size, address: str, workers: int) -> Iterator[Sequence[Connection]]:
    context = get_context("spawn")
    with ExitStack() as stack:
        team = []
        for rank in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, size, address, rank, workers), daemon=True)
            process.start()
            theirs.close()
            stack.callback(process.join, 30)
            stack.callback(ours.close)
            team.append(ours)
        yield team


def _ask_all(team: Sequence[Connection], command: str) -> list[float]:
    for worker in team:
        worker.send(command)
    answers = []
    for worker in team:
        if not worker.poll(_ANSWER_SEC):
            raise TimeoutError(f"a worker of the benchmark did not answer {command} within {_ANSWER_SEC:.0f} s")
        answers.append(float(worker.recv()))
    return answers


def _work(pipe: Connection, size: Size, address: str, rank: int, world_size: int) -> None:
    """Answers each command with the CPU-seconds that it took this process."""
    from ...worker.api.connect import connect

    chance = np.random.default_rng(rank)
    grads = np.full((size.keys, size.dim), 0.01, np.float32)
    with connect(address, job="scale", staleness=None, rank=rank, world_size=world_size) as session:
        table = session.create_table("scale", dim=size.dim, optimizer=Adagrad(lr=0.01), init=Constant(0.01))
        while True:
            try:
                command = pipe.recv()
            except EOFError:
                return
            if command == "fill":
                parts = np.array_split(np.arange(size.rows, dtype=np.int64)[rank::world_size], 20)
                batches = [part for part in parts if len(part)]
                run: Callable[[Any], object] = lambda keys: table.push(  # noqa: E731
                    keys, np.full((len(keys), size.dim), 0.01, np.float32)
                )
            else:
                batches = [chance.choice(size.rows, size.keys, replace=False) for _ in range(size.rounds)]
                run = table.pull if command == "pull" else lambda keys: table.push(keys, grads)
            begin = time.process_time()
            for keys in batches:
                run(keys)
            pipe.send(time.process_time() - begin)


# ---- many shards, stub workers


def _crowd(size: Size) -> Iterator[Figure]:
    name = f"scale {size.crowd_shards} shards, {size.crowd_workers} stub workers"
    begin = time.perf_counter()
    with local_cluster(shards=size.crowd_shards, io_threads=1, deadline_sec=600.0, shard_lease=30.0) as cluster:
        yield Figure(f"{name}: start of all processes", time.perf_counter() - begin, "s", higher_is_better=False)
        yield from _slot_map(name, cluster.address)
        with _stubs(size, cluster.address) as stubs:
            shards_before = [resident_bytes(pid) for pid in cluster.shard_pids]
            for mode in MODES:
                yield from _crowd_cost(name, size, cluster, stubs, mode)
            yield Figure(f"{name}: connections of each shard", float(size.crowd_workers), "connections")
            resident = [resident_bytes(pid) for pid in cluster.shard_pids]
            mib = 2.0**20
            yield Figure(f"{name}: resident memory of a shard", statistics.median(resident) / mib, "MiB")
            grown = statistics.median(after - before for after, before in zip(resident, shards_before, strict=True))
            yield Figure(f"{name}: of that since its workers came", grown / mib, "MiB")
            yield Figure(f"{name}: resident memory of the coordinator", resident_bytes(cluster.pid) / mib, "MiB")
            yield from _coordinator_load(name, size, cluster)


def _slot_map(name: str, address: str) -> Iterator[Figure]:
    with SecureChannel(address) as channel:
        stub: Any = pb_grpc.CoordinatorStub(channel)
        seconds = []
        for _ in range(50):
            begin = time.perf_counter()
            reply = stub.GetCluster(pb.GetClusterRequest(), timeout=30)
            seconds.append(time.perf_counter() - begin)
    yield Figure(f"{name}: slot map and addresses", float(reply.ByteSize()), "bytes", higher_is_better=False)
    yield Figure(f"{name}: asking for them", statistics.median(seconds) * 1000, "ms", higher_is_better=False)


@dataclass
class _Stub:
    client: Any
    table: TableSchema
    lease: Lease
    sequence: int = 0

    def run(self, mode: str, keys: np.ndarray[Any, np.dtype[np.int64]], grads: np.ndarray[Any, Any]) -> None:
        if mode == "pull":
            self.client.pull(self.table.id, keys, dim=self.table.dim)
            return
        self.sequence += 1
        self.client.push(self.table.id, keys, grads, dim=self.table.dim, lr=0.01, sequence=self.sequence)


@contextmanager
def _stubs(size: Size, address: str) -> Iterator[list[_Stub]]:
    with ExitStack() as stack:
        control = stack.enter_context(ControlClient(address, deadline_sec=60.0))
        table = control.create_table(
            TableSchema(
                namespace="default",
                name="crowd",
                dim=size.dim,
                optimizer=Adagrad(lr=0.01),
                dtype="float32",
                init=Constant(0.01),
                seed=0,
                policy=RowPolicy(),
            )
        )

        def come(rank: int) -> _Stub:
            own = ControlClient(address, deadline_sec=60.0)
            identity = own.register_worker(
                namespace="default", job="crowd", rank=rank, world_size=size.crowd_workers, staleness=None
            )
            lease = Lease(own, identity)
            return _Stub(shard_client(own.cluster(), own.security, identity), table, lease)

        with ThreadPoolExecutor(size.crowd_workers) as pool:
            stubs = list(pool.map(come, range(size.crowd_workers)))
        try:
            yield stubs
        finally:
            for stub in stubs:
                stub.lease.end()


def _crowd_cost(name: str, size: Size, cluster: LocalCluster, stubs: list[_Stub], mode: str) -> Iterator[Figure]:
    grads = np.full((size.keys, size.dim), 0.01, np.float32)

    def run_rounds(rank: int) -> None:
        chance = np.random.default_rng(rank)
        for _ in range(size.crowd_rounds):
            stubs[rank].run(mode, chance.integers(0, size.crowd_rows, size.keys), grads)

    def run_all() -> None:
        threads = [threading.Thread(target=run_rounds, args=(rank,)) for rank in range(len(stubs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    run_all()  # creates rows and makes connections
    own, servers = time.process_time(), _servers_cpu(cluster)
    run_all()
    millions = len(stubs) * size.crowd_rounds * size.keys / 1e6
    yield _cpu(f"{name}, {mode}: workers' part", (time.process_time() - own) / millions)
    yield _cpu(f"{name}, {mode}: servers' part", (_servers_cpu(cluster) - servers) / millions)


def _coordinator_load(name: str, size: Size, cluster: LocalCluster) -> Iterator[Figure]:
    """Yields the cost of heartbeats alone, of shards and workers."""
    begin = process_cpu(cluster.pid)
    shards = _servers_cpu(cluster)
    time.sleep(size.quiet_sec)
    used = (process_cpu(cluster.pid) - begin) / size.quiet_sec
    idle = (_servers_cpu(cluster) - shards) / size.quiet_sec / size.crowd_shards
    yield Figure(f"{name}: coordinator, heartbeats alone", used * 100, "% of a core", higher_is_better=False)
    yield Figure(f"{name}: an idle shard", idle * 100, "% of a core", higher_is_better=False)
