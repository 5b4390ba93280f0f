"""Tables on the devices of gloo ranks, with real processes: bit for bit what tables on servers become."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import sparserow as sr
import torch
import torch.distributed as dist
from sparserow.proto.control import ControlClient
from sparserow.worker.membership.shard_client import shard_client
from sparserow_process import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

ROWS, DIM, STEPS, MICRO = 61, 8, 30, 2
KINDS = {
    "sgd": sr.SGD(lr=0.5, momentum=0.9, weight_decay=1e-3),
    "adagrad": sr.Adagrad(lr=0.3, initial_accumulator=0.1),
    "rowwise": sr.RowWiseAdagrad(lr=0.3),
    "adam": sr.Adam(lr=0.05, weight_decay=1e-3),
}
TABLES = tuple(KINDS)


class Net(nn.Module):
    """A table of each optimizer: rows, a weighted sum, a mean and a maximum of bags, the first two with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.sgd = nn.Embedding(ROWS, DIM, padding_idx=3)
        self.adagrad = nn.EmbeddingBag(ROWS, DIM, mode="sum", padding_idx=3)
        self.rowwise = nn.EmbeddingBag(ROWS, DIM, mode="mean")
        self.adam = nn.EmbeddingBag(ROWS, DIM, mode="max")
        self.top = nn.Linear(4 * DIM, 1)

    def forward(self, ids: Tensor, bags: Tensor, weights: Tensor, flat: Tensor, offsets: Tensor) -> Tensor:
        one = self.sgd(ids) + self.sgd(flat[: len(ids)].reshape(-1).int())
        parts = [one, self.adagrad(bags, per_sample_weights=weights), self.rowwise(flat, offsets), self.adam(bags)]
        return self.top(torch.cat(parts, dim=1)).flatten()


def batch(step: int, worker: int, *, size: int = 6) -> tuple[Tensor, ...]:
    """Ids of a skewed distribution, with duplicates; some workers have only the first few, and bags may be empty."""
    draw = torch.Generator().manual_seed(100 * step + worker)
    few = 2 if (step + worker) % 5 == 0 else ROWS

    def ids(*shape: int) -> Tensor:
        return (torch.rand(shape, generator=draw) ** 3 * few).long()

    weights = torch.rand(size, 3, generator=draw)
    offsets = torch.tensor([0, 2, 2, 5, 5, 9])[:size]
    labels = torch.rand(size, generator=draw)
    return ids(size), ids(size, 3), weights, ids(12), offsets, labels


def make(session: sr.Session, placement: str, **options: object) -> Net:
    torch.manual_seed(9)
    return sr.distribute(
        Net(),
        session,
        optimizer=sr.SGD(lr=1.0),
        min_rows=1,
        tables={name: sr.Table(optimizer=KINDS[name], placement=placement) for name in TABLES},
        **options,
    )


def train(session: sr.Session, model: nn.Module, steps: range = range(STEPS), **options: object) -> list[float]:
    dense = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in steps:
        for micro in range(MICRO):
            *inputs, labels = batch(2 * step + micro, session.rank)
            loss = nn.functional.mse_loss(model(*inputs), labels)
            (loss * 64).backward()
            losses.append(loss.item())
        assert session.step(dense, **options)
    return losses


def rows_on_servers(session: sr.Session) -> dict[str, list[np.ndarray]]:
    """Weights, state and update counts of every table, by key; initial rows where there was no push."""
    control = session.core.catalog
    assert isinstance(control, ControlClient)
    client = shard_client(
        control.cluster(), control.security, session.core.identity, wire_dtype="float32", replay_bytes=0
    )
    found = {}
    for name in TABLES:
        schema = session.table(name).schema
        counts = np.zeros(ROWS, dtype=np.int64)
        state: list[np.ndarray] = []
        keys: list[np.ndarray] = []
        for shard in range(client.shards.shard_count):
            for some, _, updates, _, values in client.scan(schema.id, shard=shard, with_state=True):
                counts[some.astype(np.int64)] = updates
                keys.append(some)
                state.append(values)
        whole = np.zeros((ROWS, state[0].shape[1]), dtype=np.float32)
        whole[np.concatenate(keys).astype(np.int64)] = np.concatenate(state)
        found[name] = [session.table(name).pull(np.arange(ROWS)), whole, counts]
    return found


def rows_on_devices(session: sr.Session) -> dict[str, list[np.ndarray]]:
    """The same of tables on devices; every rank calls it."""
    tables, found = session.core.device_tables, {}
    for name in TABLES:
        mine = tables.table(name)
        sizes = [mine.share.size(rank) for rank in range(mine.share.world)]
        keys = torch.cat([mine.share.keys_of(rank) for rank in range(mine.share.world)]).argsort()
        parts = [mine.weights, mine.state, mine.update_counts.unsqueeze(1)]
        weights, state, counts = (torch.cat(tables.exchanges.gathered(part, sizes))[keys].numpy() for part in parts)
        found[name] = [weights, np.where(counts > 0, state, 0), counts[:, 0]]
    return found


def bits(rank: int, address: str, folder: Path) -> None:
    """Every optimizer, 30 steps, on servers and on devices."""
    world = dist.get_world_size()
    seen = {}
    for placement in ("servers", "device"):
        with sr.connect(address, f"{placement}{world}") as session:
            model = make(session, placement)
            eval_losses = train(session, DistributedDataParallel(model), clip_row_norm=40.0)
            model.eval()
            with torch.no_grad():
                scores = model(*batch(7, rank)[:-1])
            stats = session.stats()
            assert stats.clipped_rows > 0
            assert stats.device_tables == (4 if placement == "device" else 0)
            rows = rows_on_devices(session) if placement == "device" else rows_on_servers(session)
            seen[placement] = (eval_losses, scores.tolist(), rows)
            dist.barrier()
    assert seen["device"][:2] == seen["servers"][:2]
    for name in TABLES:
        for what, here, there in zip(
            ("weights", "state", "counts"), seen["device"][2][name], seen["servers"][2][name], strict=True
        ):
            if what == "state":
                there = np.where(seen["servers"][2][name][2][:, None] > 0, there, 0)
            assert np.array_equal(here, there), (name, what)


CASES = {bits: 0}


def main(rank: int, world: int, address: str, folder: str, *names: str) -> None:
    torch.set_num_threads(1)
    for case in CASES:
        if names and case.__name__ not in names:
            continue
        meet = f"file://{folder}/meet-{case.__name__}-{world}"
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world, timeout=timedelta(seconds=60))
        case(rank, address, Path(folder))
        dist.barrier()
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def cluster() -> Iterator[sr.LocalCluster]:
    with sr.local_cluster(shards=2) as running:
        yield running


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_table_on_devices_has_the_bits_of_one_on_servers(
    cluster: sr.LocalCluster, tmp_path: Path, world: int
) -> None:
    run_ranks(__file__, world, world, cluster.address, tmp_path, "bits", deadline_sec=120)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
