"""Workers with unequal numbers of batches under torch's Join, at staleness 0, against one process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import sparserow as sr
from sparserow_process import run_ranks

ROWS, DIM = 100, 4
BATCHES = (7, 10)  # of rank 0 and rank 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(ROWS, DIM)
        self.head = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.one(ids)).squeeze(1)


def make_net() -> Net:
    torch.manual_seed(5)
    return Net()


def loss_of(model: nn.Module, at: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * at + rank)
    return (model(torch.randint(0, ROWS, (8,), generator=generator)) ** 2).mean()


def reference(counts: tuple[int, int], micro_batches: int = 1) -> Net:
    """Both workers' batches in one process: gradients are halved also when one worker is left."""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for begin in range(0, max(counts), micro_batches):
        optimizer.zero_grad()
        for at in range(begin, begin + micro_batches):
            for rank, count in enumerate(counts):
                if at < count:
                    (loss_of(model, at, rank) / 2).backward()
        optimizer.step()
    return model


def train_with_ddp(rank: int, address: str) -> dict[str, Tensor]:
    """The model in DDP."""
    with sr.connect(address, "ddp") as session:
        model = session.distribute(make_net(), optimizer=sr.optim.SGD(lr=0.2), min_rows=1)
        ddp = DistributedDataParallel(model)
        dense = torch.optim.SGD(ddp.parameters(), lr=0.2)
        with Join([ddp, session]):
            for at in range(BATCHES[rank]):
                loss_of(ddp, at, rank).backward()
                assert session.step(dense)
        assert session.current_step == max(BATCHES)
        dist.barrier()
    return model.head.state_dict()


def train_with_ddp_behind(rank: int, address: str) -> dict[str, Tensor]:
    """At staleness 1 the last phase of a commit is sent in the background: of empty ones, too."""
    with sr.connect(address, "behind", staleness=1) as session:
        model = session.distribute(make_net(), optimizer=sr.optim.SGD(lr=0.2), min_rows=1)
        ddp = DistributedDataParallel(model)
        dense = torch.optim.SGD(ddp.parameters(), lr=0.2)
        with Join([ddp, session]):
            for at in range(BATCHES[rank]):
                loss_of(ddp, at, rank).backward()
                assert session.step(dense)
        session.flush()
        assert session.current_step == max(BATCHES)
        dist.barrier()
    return model.head.state_dict()


def train_accumulating(rank: int, address: str) -> dict[str, Tensor]:
    """Two micro-batches a step, the first without allreduce."""
    with sr.connect(address, "accumulating") as session:
        model = session.distribute(make_net(), optimizer=sr.optim.SGD(lr=0.2), min_rows=1)
        ddp = DistributedDataParallel(model)
        dense = torch.optim.SGD(ddp.parameters(), lr=0.2)
        with Join([ddp, session], micro_batches=2):
            for at in range(0, (6, 10)[rank], 2):
                with ddp.no_sync():
                    loss_of(ddp, at, rank).backward()
                loss_of(ddp, at + 1, rank).backward()
                assert session.step(dense)
        assert session.current_step == 5
        dist.barrier()
    return model.head.state_dict()


def train_rows_alone(rank: int, address: str) -> dict[str, Tensor]:
    """No dense parameter, so the session is the first in Join; one step of rank 1 is refused while rank 0 shadows."""
    with sr.connect(address, "alone") as session:
        model = session.distribute(make_net(), optimizer=sr.optim.SGD(lr=0.2), min_rows=1)
        with Join([session]):
            for at in range(BATCHES[rank]):
                if at == 8:
                    (loss_of(model, at, rank) * float("nan")).backward()
                    with pytest.raises(sr.NonFiniteGradient):
                        session.step()
                loss_of(model, at, rank).backward()
                assert session.step()
        assert session.current_step == max(BATCHES)
        dist.barrier()
    return {}


def refusals(rank: int, address: str) -> dict[str, Tensor]:
    """What Join cannot honour is said before anyone waits; data that ends within a step, by who has it."""
    with sr.connect(address, "refusals") as session:
        model = session.distribute(make_net(), optimizer=sr.optim.SGD(lr=0.2), min_rows=1)
        with pytest.raises(sr.errors.InvalidArgument, match="divide_by_initial_world_size: False is not allowed"):
            Join([session], divide_by_initial_world_size=False)
        with pytest.raises(sr.errors.InvalidArgument, match=r"micro_batches: 0 is not allowed"):
            Join([session], micro_batches=0)
        loss_of(model, 0, rank).backward()
        with (
            pytest.raises(sr.errors.InvalidArgument, match=r"stand behind.*Join\(\[ddp_model, session\]\)"),
            Join([session]),
        ):
            session.step(torch.optim.SGD(model.parameters(), lr=0.2))
        with pytest.raises(sr.errors.FailedPrecondition, match="ended within a step"):
            session.join_hook().main_hook()
        session.discard()
        ddp = DistributedDataParallel(model)
        parts = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.2)
        loss_of(ddp, 0, rank).backward()
        stands_still = pytest.raises(sr.errors.InvalidArgument, match="Join: ZeroRedundancyOptimizer is not allowed")
        with stands_still, Join([ddp, session, parts]):
            session.step(parts)
        dist.barrier()
    return {}


def train_rank(rank: int, address: str, folder: str) -> None:
    """One rank; every case in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    for case in (train_with_ddp, train_with_ddp_behind, train_accumulating, train_rows_alone, refusals):
        torch.save(case(rank, address), f"{folder}/{case.__name__}{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def cluster() -> Iterator[sr.LocalCluster]:
    with sr.local_cluster(shards=2) as running:
        yield running


def test_a_worker_whose_data_ends_holds_nobody_up(cluster: sr.LocalCluster, tmp_path: Path) -> None:
    run_ranks(__file__, 2, cluster.address, tmp_path)
    wanted = {"ddp": reference(BATCHES), "accumulating": reference((6, 10), 2)}
    for name, function in (("ddp", "train_with_ddp"), ("accumulating", "train_accumulating")):
        for rank in range(2):  # torch's Join gives all ranks the weights of the last
            head = torch.load(tmp_path / f"{function}{rank}.pt")
            torch.testing.assert_close(head["weight"], wanted[name].head.weight.detach(), rtol=1e-5, atol=1e-6)
        assert_rows(cluster, name, wanted[name])
    behind = [torch.load(tmp_path / f"train_with_ddp_behind{rank}.pt")["weight"] for rank in range(2)]
    torch.testing.assert_close(behind[0], behind[1], rtol=0, atol=0)
    frozen_head = make_net()
    optimizer = torch.optim.SGD(frozen_head.one.parameters(), lr=0.2)
    for at in range(max(BATCHES)):
        optimizer.zero_grad()
        for rank, count in enumerate(BATCHES):
            if at < count:
                (loss_of(frozen_head, at, rank) / 2).backward()
        optimizer.step()
    assert_rows(cluster, "alone", frozen_head)


def assert_rows(cluster: sr.LocalCluster, namespace: str, model: Net) -> None:
    with sr.connect(cluster.address, namespace, job="reader") as session:
        rows = session.table("one").pull(np.arange(ROWS))
    np.testing.assert_allclose(rows, model.one.weight.detach(), rtol=1e-5, atol=1e-6)
    assert not np.allclose(rows, make_net().one.weight.detach())


def test_join_needs_a_group(cluster: sr.LocalCluster) -> None:
    with (
        sr.connect(cluster.address, "no-group") as session,
        pytest.raises(sr.errors.FailedPrecondition, match=r"needs torch\.distributed"),
    ):
        Join([session])


if __name__ == "__main__":  # one rank of the test
    train_rank(int(sys.argv[1]), sys.argv[2], sys.argv[3])
