"""Two synchronous workers over real shard processes: the same bits in every run and on any number of shards, and the
losses of one torch process that sees both batches."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

import sparserow as sr
from sparserow_process import run_ranks

ROWS, DIM, FIELDS, BATCH, STEPS, WORLD = 100, 8, 3, 64, 50, 2
SHARDS = [2, 1, 3, 4]


class AdamByRow:
    """torch's Adam on every row alone: a row without a gradient does not move, and its bias correction waits."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.weights = weights
        self.rows = [[nn.Parameter(row.clone()) for row in weight.detach()] for weight in weights]
        self.adam = torch.optim.Adam([row for rows in self.rows for row in rows], lr=0.01)

    def step(self) -> None:
        for weight, rows in zip(self.weights, self.rows, strict=True):
            grad = weight.grad.coalesce()
            for row in rows:
                row.grad = None
            for key, values in zip(grad.indices()[0].tolist(), grad.values(), strict=True):
                rows[key].grad = values.clone()
        self.adam.step()
        for weight, rows in zip(self.weights, self.rows, strict=True):
            weight.data.copy_(torch.stack([row.detach() for row in rows]))

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.grad = None


# The rows' optimizers: on the servers, and in torch.
OPTIMIZERS = {
    "sgd": (sr.optim.SGD(lr=0.5), lambda weights: torch.optim.SGD(weights, lr=0.5)),
    "adagrad": (sr.optim.Adagrad(lr=0.1), lambda weights: torch.optim.Adagrad(weights, lr=0.1)),
    "adam": (sr.optim.Adam(lr=0.01), AdamByRow),
}


class Net(nn.Module):
    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.one = nn.Embedding(ROWS, DIM, sparse=sparse)
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=sparse)
        self.tower = nn.Sequential(nn.Linear(2 * DIM, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: Tensor, bags: Tensor) -> Tensor:
        return self.tower(torch.cat([self.one(ids), self.bag(bags)], dim=1)).squeeze(1)


def make_net(**options: bool) -> Net:
    torch.manual_seed(7)
    return Net(**options)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(0, ROWS, (BATCH, 1 + FIELDS), generator=generator)
    labels = (ids[:, 0] % 2).float()
    return ids[:, 0], ids[:, 1:], labels


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    ids, bags, labels = batch(step, rank)
    return binary_cross_entropy_with_logits(model(ids, bags), labels)


def train_rank(rank: int, folder: Path, runs: list[str]) -> None:
    """One rank of each run (NAME,OPTIMIZER,ADDRESS); writes its losses, and on rank 0 the final rows and tower."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    for run in runs:
        name, optimizer, address = run.split(",")
        with sr.connect(address, "same") as session:
            model = session.distribute(make_net(), optimizer=OPTIMIZERS[optimizer][0], min_rows=1)
            ddp = DistributedDataParallel(model)
            dense = torch.optim.Adam(ddp.parameters(), lr=0.01)
            losses = []
            for step in range(STEPS):
                loss = loss_of(ddp, step, rank)
                losses.append(float(loss.detach()))
                loss.backward()
                session.step(dense)
            dist.barrier()
            np.save(folder / f"{name}-losses-{rank}.npy", losses)
            if rank == 0:
                rows = {table: session.table(table).pull(np.arange(ROWS)) for table in ("one", "bag")}
                tower = torch.cat([p.detach().flatten() for p in model.tower.parameters()]).numpy()
                np.savez(folder / f"{name}.npz", tower=tower, **rows)
                for table in ("one", "bag"):
                    session.core.catalog.drop_table(session.namespace, table)
            dist.barrier()
            time.sleep(0.3 * rank)  # rank 0 is back in the job before rank 1 has left it
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of all runs: one pair of workers goes from cluster to cluster."""
    folder = tmp_path_factory.mktemp("determinism")
    with ExitStack() as stack:
        clusters = [stack.enter_context(sr.local_cluster(shards=shards)).address for shards in SHARDS]
        runs = [f"shards{shards},adagrad,{address}" for shards, address in zip(SHARDS, clusters, strict=True)]
        runs += [f"again,adagrad,{clusters[0]}"]
        runs += [f"{optimizer},{optimizer},{clusters[0]}" for optimizer in OPTIMIZERS]
        run_ranks(__file__, WORLD, folder, *runs)
    return folder


@pytest.mark.parametrize("other", ["again", "shards1", "shards3", "shards4"])
def test_rows_are_the_same_bits_in_every_run_and_on_any_number_of_shards(outcome: Path, other: str) -> None:
    one, two = (np.load(outcome / f"{name}.npz") for name in ("shards2", other))
    assert set(one.files) == {"one", "bag", "tower"}
    for name in one.files:
        np.testing.assert_array_equal(one[name].view(np.uint32), two[name].view(np.uint32))
    initial = make_net()
    assert np.abs(one["one"] - initial.one.weight.detach().numpy()).max() > 0.1


@pytest.mark.parametrize(("optimizer", "tolerance"), [("sgd", 1e-5), ("adagrad", 1e-5), ("adam", 1e-3)])
def test_losses_are_those_of_one_torch_process(outcome: Path, optimizer: str, tolerance: float) -> None:
    torch.set_num_threads(1)
    model = make_net(sparse=True)
    optimizers = [
        OPTIMIZERS[optimizer][1]([model.one.weight, model.bag.weight]),
        torch.optim.Adam(model.tower.parameters(), lr=0.01),
    ]
    losses = []
    for step in range(STEPS):
        loss = torch.stack([loss_of(model, step, rank) for rank in range(WORLD)]).mean()
        losses.append(float(loss.detach()))
        loss.backward()
        with torch.sparse.check_sparse_tensor_invariants(False):  # torch's own gradients; it warns when not told
            for one in optimizers:
                one.step()
                one.zero_grad()
    ours = np.mean([np.load(outcome / f"{optimizer}-losses-{rank}.npy") for rank in range(WORLD)], axis=0)
    print(optimizer, "largest difference of a loss:", np.abs(ours - losses).max())
    np.testing.assert_allclose(ours, losses, rtol=0, atol=tolerance)
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.02


if __name__ == "__main__":
    train_rank(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
