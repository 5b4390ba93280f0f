"""``sr.connect(mesh=)`` by hand: towers in parts on gloo, against DDP, with real processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import sparserow as sr
import torch
import torch.distributed as dist
from sparserow_process import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

ROWS, DIM, STEPS, BATCH = 60, 8, 6, 16


class Net(nn.Module):
    """Rows of an embedding and a bag; the top is what ranks have in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(ROWS, DIM)
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.bottom = nn.Linear(3, DIM)
        self.top = nn.Sequential(nn.Linear(3 * DIM, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, dense: Tensor, ids: Tensor, bags: Tensor) -> Tensor:
        below = torch.relu(self.bottom(dense))
        return self.top(torch.cat([below, self.one(ids), self.bag(bags)], dim=1)).squeeze(1)


def make_net() -> Net:
    torch.manual_seed(5)
    return Net()


def batch(step: int, worker: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + worker)
    ids = torch.randint(0, ROWS, (BATCH,), generator=generator)
    bags = torch.randint(0, ROWS, (BATCH, 3), generator=generator)
    dense = torch.randn(BATCH, 3, generator=generator)
    return dense, ids, bags, (ids % 2).float()


def distributed(session: sr.Session) -> Net:
    return sr.distribute(make_net(), session, optimizer=sr.Adagrad(lr=0.1), min_rows=1)


def split_top(model: Net, mesh: DeviceMesh) -> None:
    parallelize_module(model.top, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def mean_over(group: dist.ProcessGroup, model: nn.Module) -> None:
    """What DDP does to gradients, for parameters that a tensor group has in parts."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        grad = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
        dist.all_reduce(grad, group=group)
        grad /= dist.get_world_size(group)


def train(
    session: sr.Session, model: nn.Module, *, before_step: Callable[[], None] = lambda: None, steps: int = STEPS
) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        *inputs, labels = batch(step, session.rank)
        loss = nn.functional.binary_cross_entropy_with_logits(model(*inputs), labels)
        loss.backward()
        before_step()
        assert session.step(optimizer)
        losses.append(float(loss))
    assert session.current_step == steps
    return losses


def by_ddp(rank: int, address: str, folder: Path) -> None:
    with sr.connect(address, "ddp") as session:
        losses = train(session, DistributedDataParallel(distributed(session)))
    torch.save((session.rank, losses), folder / f"ddp{rank}.pt")
    dist.barrier()


def by_tensor(rank: int, address: str, folder: Path) -> None:
    """Two groups of two ranks; the gradients are averaged over the groups by hand."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    with sr.connect(address, "tensor", mesh=mesh) as session:
        assert (session.rank, session.world_size) == (rank // 2, 2)
        model = distributed(session)
        split_top(model, mesh["tensor"])
        losses = train(session, model, before_step=lambda: mean_over(mesh.get_group("data"), model))
        torch.save((session.rank, losses), folder / f"tensor{rank}.pt")
        dist.barrier()


def by_both(rank: int, address: str, folder: Path) -> None:
    """Towers split over the tensor dimension and sharded over that of data."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with sr.connect(address, "both", mesh=mesh) as session:
        model = distributed(session)
        split_top(model, mesh["tp"])
        fully_shard(model, mesh=mesh["dp"])
        torch.save((session.rank, train(session, model)), folder / f"both{rank}.pt")
        dist.barrier()


def main(rank: int, world: int, cases: str, address: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{cases}", rank=rank, world_size=world)
    for case in cases.split(","):
        globals()[case](rank, address, Path(folder))
    dist.destroy_process_group()


def run(world: int, cases: str, address: str, folder: Path) -> None:
    run_ranks(__file__, world, world, cases, address, folder, deadline_sec=120)


@pytest.fixture(scope="module")
def cluster() -> Iterator[sr.LocalCluster]:
    with sr.local_cluster(shards=2) as running:
        yield running


@pytest.fixture(scope="module")
def ddp(cluster: sr.LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[float]]:
    """The losses of each worker under DDP."""
    folder = tmp_path_factory.mktemp("ddp")
    run(2, "by_ddp", cluster.address, folder)
    return dict(torch.load(folder / f"ddp{rank}.pt") for rank in range(2))


def rows_of(cluster: sr.LocalCluster, namespace: str) -> np.ndarray:
    with sr.connect(cluster.address, namespace, job="reader") as session:
        return np.concatenate([session.table(name).pull(np.arange(ROWS)) for name in ("one", "bag")])


def test_towers_in_parts_train_as_with_ddp(cluster: sr.LocalCluster, ddp, tmp_path: Path) -> None:
    run(4, "by_tensor,by_both", cluster.address, tmp_path)
    for case in ("tensor", "both"):
        for rank in range(4):
            worker, losses = torch.load(tmp_path / f"{case}{rank}.pt")
            np.testing.assert_allclose(losses, ddp[worker], rtol=0, atol=1e-6, err_msg=f"{case} {rank}")
        np.testing.assert_allclose(rows_of(cluster, case), rows_of(cluster, "ddp"), rtol=0, atol=1e-5)


if __name__ == "__main__":  # one rank of a test
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6])
