"""Prefetch over real processes: two workers, two shards, rows equal to the bit to those of a run without it."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparserow as sr
from sparserow_process import DEADLINE_SEC, run_ranks

ROWS, DIM, STEPS, DEPTH = 80, 4, 14, 3
OPTIMIZERS = {"adagrad": sr.optim.Adagrad(lr=0.3), "adam": sr.optim.Adam(lr=0.05)}
# name: (staleness, whether batches are prefetched)
RUNS: dict[str, tuple[int | None, bool]] = {
    "without": (0, False),
    "ahead": (0, True),
    "bounded": (1, True),
    "async": (None, True),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(ROWS, DIM)
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.head = nn.Linear(2 * DIM, 1)

    def forward(self, ids: Tensor, bags: Tensor) -> Tensor:
        return self.head(torch.cat([self.one(ids), self.bag(bags)], dim=1)).squeeze(1)


class Batches:
    """Uneven, so that the workers' pulls and commits meet in many orders."""

    def __init__(self, rank: int, seed: int) -> None:
        self.rank, self.delays = rank, random.Random(f"{seed} {rank}")

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(STEPS):
            time.sleep(self.delays.choice([0.0, 0.0, 0.004]))
            yield batch_of(step, self.rank)


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, ROWS, (16,), generator=generator), torch.randint(0, ROWS, (16, 3), generator=generator)


def wait_for_the_next_rows(session: sr.Session, rank: int) -> None:
    """Within step 1, until rows of a later batch are here: so this rank defers some, and the other one changes some."""
    until = time.monotonic() + DEADLINE_SEC
    of_step_1 = sum(len(ids.unique()) for ids in batch_of(1, rank))
    while session.stats().rows_prefetched <= of_step_1:
        assert time.monotonic() < until, session.stats()
        time.sleep(0.001)


def train_once(address: str, namespace: str, optimizer: str, run: str, seed: int) -> dict[str, Any]:
    """This rank's run; returns its figures, and all rows as rank 0 sees them."""
    staleness, is_ahead = RUNS[run]
    rank = dist.get_rank()
    delays = random.Random(f"{seed} {rank} {run}")
    with sr.connect(address, namespace, staleness=staleness) as session:
        torch.manual_seed(5)
        model = session.distribute(Net(), optimizer=OPTIMIZERS[optimizer], min_rows=1)
        ddp = DistributedDataParallel(model)
        dense = torch.optim.SGD(ddp.parameters(), lr=0.05)
        loader: Any = Batches(rank, seed)
        batches = session.prefetch(loader, depth=DEPTH) if is_ahead else loader
        for number, (ids, bags) in enumerate(batches):
            (ddp(ids, bags) ** 2).mean().backward()
            if is_ahead and number == 1:
                wait_for_the_next_rows(session, rank)
            time.sleep(delays.choice([0.0, 0.0, 0.004]))
            assert session.step(dense)
        session.flush()
        dist.barrier()
        rows = {name: session.table(name).pull(np.arange(ROWS)) for name in ("one", "bag")}
        rows["head"] = model.head.weight.detach().numpy()
        return {"stats": asdict(session.stats()), "rows": {name: part.tolist() for name, part in rows.items()}}


def main(rank: int, address: str, folder: str, seed: int) -> None:
    """One rank of all runs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    results = {}
    for optimizer in OPTIMIZERS:
        for run in RUNS:
            name = f"{optimizer}-{run}"
            results[name] = train_once(address, name, optimizer, run, seed)
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    folder = tmp_path_factory.mktemp("ranks")
    with sr.local_cluster(shards=2) as cluster:
        run_ranks(__file__, 2, cluster.address, folder, seed)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_prefetch_is_bit_equal_to_none(results: list[dict[str, Any]], optimizer: str) -> None:
    for rank in range(2):
        plain, ahead = results[rank][f"{optimizer}-without"], results[rank][f"{optimizer}-ahead"]
        assert ahead["rows"] == plain["rows"]
        stats = ahead["stats"]
        assert stats["lookups_missed"] == 0
        assert 0 < stats["rows_refreshed"] <= stats["rows_revalidated"] <= stats["rows_prefetched"]  # by the other rank
        assert stats["rows_deferred"] > 0


@pytest.mark.parametrize("run", ["bounded", "async"])
def test_other_modes_train_on_what_was_prefetched(results: list[dict[str, Any]], run: str) -> None:
    for optimizer in OPTIMIZERS:
        for rank in range(2):
            stats, rows = (results[rank][f"{optimizer}-{run}"][part] for part in ("stats", "rows"))
            assert stats["steps_committed"] == STEPS
            assert stats["lookups_missed"] == 0
            assert stats["rows_prefetched"] > 0
            assert stats["rows_revalidated"] > 0
            assert np.isfinite(rows["one"]).all()
            assert rows == results[1 - rank][f"{optimizer}-{run}"]["rows"]


if __name__ == "__main__":  # one rank
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
