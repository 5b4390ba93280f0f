"""The knob ``staleness`` on real shards: what a step of several workers amounts to, and what a pull may see.

Two data-plane servers of this process; each worker has a client of its own. The reference is float64 numpy.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from sparserow.cpp_ext import _client, _server
from sparserow.proto import errors

for native in (_client, _server):
    native.set_error_factory(errors.error_of)

TABLE = _server.id_of_name("knob/rows")
SHARDS, SLOTS, JOB = 2, 64, 9
STALENESS = [0, 2, None]


@dataclass
class Cluster:
    """Servers with one table and one job."""

    servers: list[_server.Server]
    owner: np.ndarray
    dim: int

    def client(self, worker: int) -> _client.Client:
        shards = [("127.0.0.1", server.port) for server in self.servers]
        return _client.Client(
            shards=shards, slot_owner=self.owner, route_epoch=1, job_id=JOB, worker_id=worker, worker_epoch=1
        )

    def stats(self, name: str) -> list:
        return [server.stats()[name] for server in self.servers]


@contextmanager
def cluster(
    workers: int, staleness: int | None, *, dim: int = 1, optimizer: dict | None = None, spread: float = 0.0
) -> Iterator[Cluster]:
    owner = np.arange(SLOTS, dtype=np.uint16) % SHARDS
    servers = []
    for index in range(SHARDS):
        store = _server.Store(slot_count=SLOTS)
        schema = _server.TableSchema(
            id=TABLE,
            name="knob/rows",
            dim=dim,
            seed=5,
            init=_server.InitSpec(kind="uniform", a=-spread, b=spread) if spread else _server.InitSpec(),
            optimizer=_server.OptimizerSpec(**optimizer or {"kind": "sgd"}),
        )
        store.create_table(schema)
        server = _server.Server(store, shard_index=index)
        server.set_route(1, owner)
        server.set_job(JOB, "knob", staleness, [(worker, 1, worker) for worker in range(workers)])
        servers.append(server)
    try:
        yield Cluster(servers, owner, dim)
    finally:
        for server in servers:
            server.stop()


@dataclass
class Rows64:
    """Rows in float64, each with an optimizer state of its own; the formulas are those of torch.optim."""

    spec: dict
    rows: np.ndarray
    state: dict[int, dict] = field(default_factory=dict)

    def apply(self, keys: np.ndarray, grads: np.ndarray, lr: float) -> None:
        for key, grad in zip(keys.tolist(), grads, strict=True):
            row, state = self.rows[key], self.state.setdefault(key, {"t": 0})
            state["t"] += 1
            step = getattr(self, "_" + self.spec["kind"])(state, grad + self.spec.get("weight_decay", 0.0) * row)
            self.rows[key] = row - lr * step

    def _sgd(self, state: dict, grad: np.ndarray) -> np.ndarray:
        momentum = self.spec.get("momentum", 0.0)
        if momentum == 0.0:
            return grad
        fresh = (1 - self.spec.get("dampening", 0.0)) * grad
        state["m"] = momentum * state["m"] + fresh if state["t"] > 1 else grad
        return grad + momentum * state["m"] if self.spec.get("nesterov") else state["m"]

    def _adagrad(self, state: dict, grad: np.ndarray) -> np.ndarray:
        state["s"] = state.get("s", self.spec.get("initial_accumulator", 0.0)) + grad**2
        return grad / (np.sqrt(state["s"]) + self.spec["eps"])

    def _rowwise_adagrad(self, state: dict, grad: np.ndarray) -> np.ndarray:
        state["s"] = state.get("s", self.spec.get("initial_accumulator", 0.0)) + (grad**2).mean()
        return grad / (np.sqrt(state["s"]) + self.spec["eps"])

    def _adam(self, state: dict, grad: np.ndarray) -> np.ndarray:
        one, two = self.spec["beta1"], self.spec["beta2"]
        state["m"] = one * state.get("m", 0.0) + (1 - one) * grad
        state["v"] = two * state.get("v", 0.0) + (1 - two) * grad**2
        root = np.sqrt(state["v"] / (1 - two ** state["t"]))
        return state["m"] / (1 - one ** state["t"]) / (root + self.spec["eps"])


OPTIMIZERS = {
    "sgd": {"kind": "sgd"},
    "sgd-decay": {"kind": "sgd", "weight_decay": 0.01},
    "momentum": {"kind": "sgd", "momentum": 0.9, "dampening": 0.25},
    "nesterov": {"kind": "sgd", "momentum": 0.5, "nesterov": True},
    "adagrad": {"kind": "adagrad", "eps": 1e-8, "initial_accumulator": 0.5},
    "rowwise_adagrad": {"kind": "rowwise_adagrad", "eps": 1e-8, "initial_accumulator": 0.5},
    "adam": {"kind": "adam", "eps": 1e-6, "beta1": 0.75, "beta2": 0.9375},
}


@pytest.mark.parametrize("staleness", STALENESS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_recorded_gradients_give_the_rows_of_float64(optimizer: str, staleness: int | None) -> None:
    """Three workers' gradients in a random but recorded order of arrival, 12 steps."""
    workers, steps, keys, dim, lr = 3, 12, 30, 7, 0.0625
    seed = 11
    print(f"seed {seed}")
    order, rng = random.Random(seed), np.random.default_rng(seed)
    with cluster(workers, staleness, dim=dim, optimizer=OPTIMIZERS[optimizer], spread=0.5) as shards:
        clients = [shards.client(worker) for worker in range(workers)]
        everything = np.arange(keys, dtype=np.uint64)
        first, _, _ = clients[0].pull(TABLE, everything, dim=dim)
        reference = Rows64(OPTIMIZERS[optimizer], first.astype(np.float64))
        for step in range(steps):
            summed = np.zeros((keys, dim))
            touched = np.zeros(keys, bool)
            for worker in order.sample(range(workers), workers):
                mine = np.sort(rng.choice(keys, 12, replace=False)).astype(np.uint64)
                grads = rng.standard_normal((12, dim), np.float32)
                clients[worker].push(TABLE, mine, grads, dim=dim, lr=lr, sequence=step + 1, step=step)
                share = grads.astype(np.float64) / workers
                if staleness == 0:
                    summed[mine] += share
                    touched[mine] = True
                else:
                    reference.apply(mine, share, lr)
            if staleness == 0:
                reference.apply(np.flatnonzero(touched), summed[touched], lr)
        rows, _, _ = clients[0].pull(TABLE, everything, dim=dim, step=steps)
    error = np.abs(rows - reference.rows).max(axis=1) / np.abs(reference.rows).max(axis=1)
    assert error.max() < 1e-6
    assert np.abs(rows - first).max() > 0.05


def counter_keys(owner: np.ndarray, workers: int) -> np.ndarray:
    """(workers, SHARDS) keys: one row for each worker on each shard."""
    keys = np.arange(64 * workers, dtype=np.uint64)
    shard_of = np.array([owner[_server.slot_of(_server.row_hash(TABLE, int(key)), SLOTS)] for key in keys])
    return np.ascontiguousarray(np.stack([keys[shard_of == shard][:workers] for shard in range(SHARDS)], axis=1))


class Counting:
    """A worker whose commit of each step adds one to its row on every shard; rows begin at zero."""

    def __init__(self, shards: Cluster, worker: int, workers: int) -> None:
        self.worker, self.step = worker, 0
        self.client = shards.client(worker)
        self.keys = counter_keys(shards.owner, workers)
        self.seen: list[np.ndarray] = []  # of each pull: (workers, SHARDS) steps that it saw

    def pull(self, deadline_ms: int = 20_000) -> None:
        flat = self.keys.reshape(-1)
        rows, _, _ = self.client.pull(TABLE, flat, dim=1, step=self.step, deadline_ms=deadline_ms)
        self.seen.append(rows.reshape(self.keys.shape).astype(int))

    def commit(self) -> None:
        ones = -np.ones((SHARDS, 1), np.float32)
        self.client.push(
            TABLE, self.keys[self.worker], ones, dim=1, lr=1.0, sequence=self.step + 1, step=self.step, grad_sum=True
        )
        self.step += 1


@pytest.mark.parametrize("staleness", [0, 1, 3, None])
def test_the_bound_is_never_broken_under_random_delays(staleness: int | None) -> None:
    """Every pull shows, by the workers' counters on both shards, which steps it saw."""
    workers, steps, seed = 3, 60, 4
    print(f"seed {seed}")
    with cluster(workers, staleness) as shards:
        team = [Counting(shards, worker, workers) for worker in range(workers)]

        def run(worker: Counting) -> None:
            rng = random.Random(seed * 100 + worker.worker)
            for _ in range(steps):
                time.sleep(rng.choice([0, 0, 0.001, 0.004]))
                worker.pull()
                time.sleep(rng.choice([0, 0, 0.001, 0.004]))
                worker.commit()

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(run, team))
        bounded = 2 * steps if staleness is None else staleness
        assert max(shards.stats("staleness_max")) <= bounded
        for counted in shards.stats("staleness"):
            pulls, _ = counted[TABLE]
            beyond = [count for bound, count in zip(_server.STALENESS_BOUNDS, pulls, strict=False) if bound > bounded]
            assert sum(pulls) == workers * steps
            assert sum(beyond) == pulls[-1] == 0
        assert shards.stats("pulls_waiting") == [0] * SHARDS
        assert shards.stats("kept_bytes") == [0] * SHARDS
    for worker in team:
        for step, seen in enumerate(worker.seen):
            if staleness == 0:
                assert (seen == step).all()
            else:
                assert (seen[worker.worker] == step).all()
                assert staleness is None or (seen >= step - staleness).all()


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_a_pull_beyond_the_bound_ends_at_its_deadline_and_names_whom_it_waited_for(staleness: int) -> None:
    with cluster(3, staleness) as shards:
        fast, slow, late = (Counting(shards, worker, 3) for worker in range(3))
        slow.commit()
        for _ in range(staleness + 1):  # steps 0 .. staleness need nobody's commit
            fast.pull()
            fast.commit()
        assert shards.stats("pulls_parked") == [0] * SHARDS
        with pytest.raises(errors.DeadlineExceeded, match=r"for commits of step 0 from worker ids 2\b"):
            fast.pull(deadline_ms=2000)
        late.commit()
        fast.pull()
        fast.commit()
        with pytest.raises(errors.DeadlineExceeded, match=r"for commits of step 1 from worker ids 1, 2\b"):
            fast.pull(deadline_ms=2000)


@pytest.mark.parametrize("staleness", [1000, None])
def test_with_a_large_bound_nothing_waits(staleness: int | None) -> None:
    """One worker makes 50 steps while the other makes none."""
    with cluster(2, staleness) as shards:
        fast = Counting(shards, 0, 2)
        for _ in range(50):
            fast.pull()
            fast.commit()
        assert shards.stats("pulls_parked") == [0] * SHARDS
        assert shards.stats("staleness_max") == [49] * SHARDS
        for counted in shards.stats("staleness"):
            pulls, total = counted[TABLE]
            # Up to 0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64 steps.
            assert pulls[:11] == [1, 1, 1, 1, 1, 2, 2, 4, 4, 16, 17]
            assert total == sum(range(50))
        assert shards.stats("job_steps") == [{JOB: 49}] * SHARDS


def test_a_parked_pull_goes_on_with_the_commit_that_it_waits_for() -> None:
    with cluster(2, 1) as shards:
        fast, slow = (Counting(shards, worker, 2) for worker in range(2))
        for _ in range(2):
            fast.pull()
            fast.commit()
        waiting = threading.Thread(target=fast.pull)
        waiting.start()
        while min(shards.stats("pulls_waiting")) == 0:
            time.sleep(0.001)
        slow.commit()
        waiting.join(120)
        assert not waiting.is_alive()
        assert len(fast.seen) == 3
        assert shards.stats("staleness_max") == [1] * SHARDS
