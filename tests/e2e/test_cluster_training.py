"""The joint over real processes: connect, train on two shards, DDP, eval, errors, and the figures of torch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparserow as sr
from sparserow_process import run_ranks

ROWS, DIM, STEPS = 300, 4, 12


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(ROWS, DIM)
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="mean")
        self.head = nn.Linear(2 * DIM, 1)

    def forward(self, ids: Tensor, bags: Tensor) -> Tensor:
        return self.head(torch.cat([self.one(ids), self.bag(bags)], dim=1)).squeeze(1)


def make_net() -> Net:
    torch.manual_seed(5)
    return Net()


def batch(step: int, rank: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (
        torch.randint(0, ROWS, (size,), generator=generator),
        torch.randint(0, ROWS, (size, 3), generator=generator),
    )


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    return (model(*batch(step, rank)) ** 2).mean()


def train_locally(world_size: int) -> Net:
    """What every rank together must amount to: gradients averaged over ranks."""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(loss_of(model, step, rank) for rank in range(world_size)).div(world_size).backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def cluster() -> Iterator[sr.LocalCluster]:
    with sr.local_cluster(shards=2) as running:
        yield running


def assert_rows(session: sr.Session, reference: Net) -> None:
    for name, layer in (("one", reference.one), ("bag", reference.bag)):
        rows = session.table(name).pull(np.arange(ROWS))
        np.testing.assert_allclose(rows, layer.weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("staleness", [0, 2, None])
def test_one_worker_trains_as_torch(cluster: sr.LocalCluster, staleness: int | None) -> None:
    with sr.connect(cluster.address, f"single-{staleness}", staleness=staleness) as session:
        model = session.distribute(make_net(), optimizer=sr.optim.SGD(lr=0.2), min_rows=1)
        dense = torch.optim.SGD(model.parameters(), lr=0.2)
        for step in range(STEPS):
            loss_of(model, step, 0).backward()
            assert session.step(dense)
        reference = train_locally(1)
        assert_rows(session, reference)
        torch.testing.assert_close(model.head.weight, reference.head.weight, rtol=1e-5, atol=1e-6)
        model.eval()
        torch.testing.assert_close(model(*batch(99, 0)), reference(*batch(99, 0)), rtol=1e-5, atol=1e-6)
        stats = session.stats()
        assert (stats.steps_committed, stats.lookups_missed) == (STEPS, 0)
        assert stats.pulls_merged >= STEPS - 1


def train_rank(rank: int, address: str, folder: str, nan_at: int) -> None:
    """One rank of a DDP job; writes its dense weights."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    with sr.connect(address, "ddp" if nan_at < 0 else "ddp-nan") as session:
        model = session.distribute(make_net(), optimizer=sr.optim.SGD(lr=0.2), min_rows=1)
        ddp = DistributedDataParallel(model)
        dense = torch.optim.SGD(ddp.parameters(), lr=0.2)
        for step in range(STEPS):
            if step == nan_at:
                (loss_of(ddp, step, rank) * (float("nan") if rank == 1 else 1.0)).backward()
                with pytest.raises(sr.NonFiniteGradient):
                    session.step(dense)
            loss_of(ddp, step, rank).backward()
            assert session.step(dense)
        torch.save(model.head.state_dict(), f"{folder}/head{rank}.pt")
        dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("nan_at", [-1, 3])
def test_two_ddp_workers_train_as_torch(cluster: sr.LocalCluster, tmp_path: Path, nan_at: int) -> None:
    run_ranks(__file__, 2, cluster.address, tmp_path, nan_at)
    reference = train_locally(2)
    for rank in range(2):
        head = torch.load(tmp_path / f"head{rank}.pt")
        torch.testing.assert_close(head["weight"], reference.head.weight.detach(), rtol=1e-5, atol=1e-6)
    with sr.connect(cluster.address, "ddp" if nan_at < 0 else "ddp-nan", job="reader") as session:
        assert_rows(session, reference)


def test_rows_by_key_over_the_wire(cluster: sr.LocalCluster) -> None:
    with sr.connect(cluster.address, "keys") as session:
        table = session.create_table("t", dim=3, optimizer=sr.optim.SGD(lr=1.0))
        keys = np.arange(5000)
        table.push(keys, np.ones((5000, 3), np.float32))
        np.testing.assert_array_equal(table.pull([7, 4999, 5000]), [[-1] * 3, [-1] * 3, [0] * 3])
        seen = np.concatenate([found for found, _ in table.scan(batch_rows=999)])
        np.testing.assert_array_equal(np.sort(seen), keys)
        assert table.delete(np.arange(10)) == 10


def test_deferred_rows_are_born_on_the_servers(cluster: sr.LocalCluster) -> None:
    with sr.connect(cluster.address, "deferred") as session:
        with sr.deferred(min_rows=1000):
            model = nn.Sequential(nn.Embedding(2_000_000_000, 8))
        session.distribute(model, optimizer=sr.optim.Adagrad(lr=0.1), min_rows=1000)
        ids = torch.arange(4000) * 499_999
        out = model(ids)
        assert abs(float(out.mean())) < 0.05
        assert abs(float(out.std()) - 1) < 0.05
        out.sum().backward()
        assert session.step()


def test_an_unreachable_cluster_is_one_line() -> None:
    with pytest.raises(sr.errors.Unavailable, match=r"127\.0\.0\.1:1\b") as caught:
        sr.connect("127.0.0.1:1", deadline_sec=2)
    assert "\n" not in str(caught.value)
    with pytest.raises(sr.errors.InvalidArgument, match="HOST:PORT"):
        sr.connect("nowhere")


@pytest.mark.parametrize(
    ("options", "field"),
    [({"wire_dtype": "int8"}, "wire_dtype"), ({"deadline_sec": 0}, "deadline_sec"), ({"on_nonfinite": "no"}, "on_non")],
)
def test_wrong_options_are_named(options: dict[str, object], field: str) -> None:
    with pytest.raises(sr.errors.InvalidArgument, match=field):
        sr.connect("127.0.0.1:1", **options)  # type: ignore[arg-type]


def test_import_is_lazy_and_free_of_torch() -> None:
    code = "import sys, sparserow; assert 'torch' not in sys.modules; sparserow.local_cluster; sparserow.Table; "
    code += "assert 'torch' not in sys.modules; assert set(sparserow.__all__) <= set(dir(sparserow))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


if __name__ == "__main__":  # one rank of the DDP test
    train_rank(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
