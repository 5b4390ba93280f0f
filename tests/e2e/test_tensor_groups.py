"""``sr.connect(mesh=)`` by hand: towers in parts on gloo, against DDP, with real processes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import sparserow as sr
from sparserow.proto.checkpoint import manifest
from sparserow.proto.checkpoint.folder import Folder
from sparserow.worker.lookups.makers.tensor_group import without_group
from sparserow.worker.models import Tower, mlp
from sparserow.worker.training.parallel_towers import average_in_backward, clip_parts, split_towers
from sparserow_process import run_ranks

ROWS, DIM, STEPS, BATCH = 60, 8, 6, 16
HALF = STEPS // 2


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
        return self.top(torch.cat([below, self.one(ids), self.bag(bags)], dim=1)).flatten()


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
    return session.distribute(make_net(), optimizer=sr.optim.SGD(lr=2.0), min_rows=1)


def split_top(model: Net, mesh: DeviceMesh) -> None:
    parallelize_module(model.top, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def mean_over(group: dist.ProcessGroup, model: nn.Module) -> None:
    """What DDP does to gradients, for parameters that a tensor group has in parts."""
    for parameter in model.parameters():
        if parameter.grad is None:
            assert parameter.numel() == 0  # that of a layer whose rows are on the servers
            continue
        grad = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
        dist.all_reduce(grad, group=group)
        grad /= dist.get_world_size(group)


def train(
    session: sr.Session,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    before_step: Callable[[], None] = lambda: None,
    steps: range = range(STEPS),
) -> list[float]:
    optimizer = optimizer or adam(model)
    losses = []
    for step in steps:
        *inputs, labels = batch(step, session.rank)
        loss = nn.functional.binary_cross_entropy_with_logits(model(*inputs), labels)
        loss.backward()
        before_step()
        assert session.step(optimizer)
        losses.append(loss.item())
    assert session.current_step == steps.stop
    return losses


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def by_ddp(rank: int, address: str, folder: Path) -> None:
    with sr.connect(address, "ddp") as session:
        losses = train(session, DistributedDataParallel(distributed(session)))
    torch.save((session.rank, losses), folder / f"by_ddp{rank}.pt")
    dist.barrier()


def by_tensor(rank: int, address: str, folder: Path) -> None:
    """Two groups of two ranks; the gradients are averaged over the groups by hand."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    with sr.connect(address, "tensor", mesh=mesh) as session:
        assert (session.rank, session.world_size) == (rank // 2, 2)
        own = session.core.tensor_group._group
        assert dist.get_process_group_ranks(own) == dist.get_process_group_ranks(mesh.get_group("tensor"))
        assert own._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=60), "that of this process"
        model = distributed(session)
        split_top(model, mesh["tensor"])
        losses = train(session, model, before_step=lambda: mean_over(mesh.get_group("data"), model))
        torch.save((session.rank, losses), folder / f"by_tensor{rank}.pt")
        dist.barrier()


def by_both(rank: int, address: str, folder: Path) -> None:
    """Towers split over the tensor dimension and sharded over that of data."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with sr.connect(address, "both", mesh=mesh) as session:
        model = distributed(session)
        whole = sr.copy_sharing_rows(model)
        split_top(model, mesh["tp"])
        fully_shard(model, mesh=mesh["dp"])
        torch.save((session.rank, train(session, model)), folder / f"by_both{rank}.pt")
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        example = batch(0, 0)[:3]
        scores = model.eval()(*example)
        if rank == 0:
            with pytest.raises(sr.errors.FailedPrecondition, match="publish: ranks have the model in parts"):
                session.publish("ctr", model=model, example=example, root=str(folder / "models"))
            whole.load_state_dict(state)
            session.publish("ctr", model=whole, example=example, root=str(folder / "models"))
            torch.testing.assert_close(without_group(whole).eval()(*example), scores, rtol=1e-5, atol=1e-6)
        dist.barrier()


def save_in_parts(rank: int, address: str, folder: Path) -> None:
    """The first half of the steps, and a checkpoint of four ranks' parts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    with sr.connect(address, "parts", mesh=mesh) as session:
        model = distributed(session)
        split_top(model, mesh["tensor"])
        fully_shard(model, mesh=mesh["data"])
        optimizer = adam(model)
        losses = train(session, model, optimizer, steps=range(HALF))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        saved = session.save(
            str(folder / "parts"), model=model, optimizer=optimizer, scheduler=scheduler, extra={"at": HALF}
        )
        assert saved.is_done()
        assert saved.step == HALF - 1
        torch.save((session.rank, losses), folder / f"save_in_parts{rank}.pt")
        dist.barrier()


def save_whole(rank: int, address: str, folder: Path) -> None:
    """The first half of the steps under DDP, and a checkpoint of a whole dense side."""
    with sr.connect(address, "whole") as session:
        ddp = DistributedDataParallel(distributed(session))
        optimizer = adam(ddp)
        train(session, ddp, optimizer, steps=range(HALF))
        session.save(str(folder / "whole"), model=ddp, optimizer=optimizer)
        dist.barrier()


def go_on_by_fsdp(rank: int, address: str, folder: Path) -> None:
    """The second half on two ranks, each with half of every tensor."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    with sr.connect(address, "parts", mesh=mesh) as session:
        model = distributed(session)
        fully_shard(model, mesh=mesh)
        go_on(session, model, folder, "parts", f"go_on_by_fsdp{rank}")


def go_on_by_ddp(rank: int, address: str, folder: Path) -> None:
    """The second half on two ranks, each with whole tensors."""
    with sr.connect(address, "parts") as session:
        go_on(session, DistributedDataParallel(distributed(session)), folder, "parts", f"go_on_by_ddp{rank}")


def go_on_in_groups(rank: int, address: str, folder: Path) -> None:
    """The second half of what began under DDP, on four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    with sr.connect(address, "whole", mesh=mesh) as session:
        model = distributed(session)
        split_top(model, mesh["tensor"])
        fully_shard(model, mesh=mesh["data"])
        go_on(session, model, folder, "whole", f"go_on_in_groups{rank}")


def go_on(session: sr.Session, model: nn.Module, folder: Path, url: str, name: str) -> None:
    optimizer = adam(model)
    restored = session.restore(str(folder / url), model=model, optimizer=optimizer)
    assert (restored.step, restored.extra) == (HALF - 1, {"at": HALF} if url == "parts" else {})
    torch.save((session.rank, train(session, model, optimizer, steps=range(HALF, STEPS))), folder / f"{name}.pt")
    dist.barrier()


def towers_of_jobs(rank: int, address: str, folder: Path) -> None:
    """What ``train.parallel: {tensor: 2}`` does to an MLP: its gradients, averaged and clipped, against one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(7)
    whole = nn.Sequential(mlp([5, 6, 4, 8, 1]), nn.Linear(1, 1))
    parts = copy.deepcopy(whole)
    split_towers(parts, mesh["tensor"])
    average_in_backward(parts, mesh.get_group("data"), 2)
    assert sum(hasattr(parameter, "to_local") for parameter in parts.parameters()) == 8  # of four layers
    inputs = torch.randn(2, 3, 7, 5)
    for micro_batch in range(3):  # of one step
        (parts(inputs[rank // 2, micro_batch]).square().mean() / 3).backward()
        (sum(whole(inputs[worker, micro_batch]).square().mean() for worker in range(2)) / 6).backward()
    norm = float(nn.utils.clip_grad_norm_(whole.parameters(), 0.01))
    assert norm > 0.02
    clip_parts(list(parts.parameters()), 0.01)
    for (name, wanted), mine in zip(whole.named_parameters(), parts.parameters(), strict=True):
        full = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
        torch.testing.assert_close(
            full, wanted.grad, rtol=1e-5, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}"
        )
    with pytest.raises(sr.errors.InvalidArgument, match="no MLP with two linear layers"):
        split_towers(nn.Linear(2, 2), mesh["tensor"])
    odd = Tower(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    with pytest.raises(
        sr.errors.InvalidArgument, match=r"0\.1 is a BatchNorm1d, which does not work element by element"
    ):
        split_towers(nn.Sequential(odd), mesh["tensor"])


class Halves(nn.Module):
    """A layer whose columns the ranks have by hand, without the sum in backward that its input needs."""

    def __init__(self, model: Net, rank: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.one, self.group = model.one, group
        self.weight = nn.Parameter(torch.randn(DIM, 2, generator=torch.Generator().manual_seed(rank)))

    def forward(self, ids: Tensor) -> Tensor:
        return (self.one(ids) @ self.weight).sum(dim=1)


def refusals(rank: int, address: str, folder: Path) -> None:
    """What a tensor group refuses, on which ranks, and that training goes on."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    with sr.connect(address, "refusals", mesh=mesh) as session:
        model = distributed(session)
        split_top(model, mesh["tensor"])
        fully_shard(model, mesh=mesh["data"])
        optimizer = adam(model)
        *inputs, _ = batch(0, session.rank)
        is_leader = rank % 2 == 0
        before = [parameter.to_local().clone() for parameter in model.parameters() if parameter.numel() > 0]
        (model(*inputs).sum() * (float("nan") if rank // 2 else 1.0)).backward()  # in the second group alone
        with pytest.raises(sr.NonFiniteGradient):
            session.step(optimizer)
        for was, parameter in zip(before, [each for each in model.parameters() if each.numel() > 0], strict=True):
            assert torch.equal(was, parameter.to_local())
        assert session.current_step == 0
        with pytest.raises(sr.errors.FailedPrecondition, match="no backward reached a distributed table"):
            session.step(optimizer)
        with pytest.raises(sr.errors.FailedPrecondition, match="ranks of a tensor group have different batches"):
            model(*batch(rank, 0)[:3])
        wrong = (
            "is not allowed; allowed: .0, 60"
            if is_leader
            else f"lookup failed on rank {rank - 1}, which leads this tensor group"
        )
        with pytest.raises(sr.errors.InvalidArgument, match=wrong):
            model(inputs[0], inputs[1] + ROWS, inputs[2])
        session.discard()
        train(session, model, optimizer, steps=range(2))

        with pytest.raises(sr.errors.FailedPrecondition, match="with a gradient are not possible in a tensor group"):
            model.bag(inputs[2], per_sample_weights=torch.ones(BATCH, 3, requires_grad=True))
        compiled = torch.compile(model.one, backend="eager")(inputs[1])
        assert torch.equal(compiled, model.one(inputs[1]))
        compiled.sum().backward()
        session.discard()
        with pytest.raises(sr.errors.FailedPrecondition, match="session in a tensor group cannot join"):
            Join([session])
        if not is_leader:
            with pytest.raises(
                sr.errors.FailedPrecondition, match=f"leader of its tensor group, which is rank {rank - 1},"
            ):
                session.table("one")
            with pytest.raises(sr.errors.FailedPrecondition, match="has no session with the servers"):
                session.create_table("t", dim=1, optimizer=sr.optim.SGD(lr=1.0))
        dist.barrier()
    with sr.connect(address, "halves", mesh=mesh) as session:
        halves = Halves(distributed(session), rank, mesh.get_group("tensor"))
        rows = rows_now(session)
        halves(inputs[1]).sum().backward()
        with pytest.raises(sr.errors.FailedPrecondition, match="have different gradients of rows"):
            session.step(torch.optim.SGD(halves.parameters(), lr=1.0))
        assert np.array_equal(rows, rows_now(session))
        dist.barrier()
    kind = sr.errors.FailedPrecondition
    with pytest.raises(kind, match="it has 2 tables: bag" if is_leader else f"rank {rank - 1}, which leads"):
        sr.connect(address, "halves", job="anew", mesh=mesh, namespace_policy="new")


def rows_now(session: sr.Session) -> np.ndarray:
    """The rows, where this rank has them."""
    if session.core.tensor_group is not None and not session.core.tensor_group.leads:
        return np.empty(0)
    return session.table("one").pull(np.arange(ROWS))


def meshes(rank: int, address: str, folder: Path) -> None:
    """Meshes that connect refuses before it joins."""
    refused = [
        (("data", "pp"), {}, "'pp' is a dimension of pipeline parallelism"),
        (("data", "cp"), {}, "mesh_dim_names: 'cp' is not allowed; allowed: for data data, dp, "),
        (("tensor", "tp"), {}, "at most one tensor dimension"),
        (None, {}, "mesh_dim_names: None is not allowed"),
        (("data", "tensor"), {"rank": 0}, "connect.rank: 0 is not allowed; allowed: None beside mesh"),
    ]
    for names, arguments, text in refused:
        with pytest.raises(sr.errors.InvalidArgument, match=text):
            sr.connect("nowhere:1", mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=names), **arguments)
    turned = DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=("data", "tensor"))
    with pytest.raises(sr.errors.InvalidArgument, match="a mesh that holds each of the 4 ranks once, rank 0 first"):
        sr.connect("nowhere:1", mesh=turned)
    with pytest.raises(sr.errors.InvalidArgument, match=r"connect\.mesh: 'list' is not allowed"):
        sr.connect("nowhere:1", mesh=[0, 1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    with pytest.raises(sr.errors.Unavailable, match="nowhere" if rank % 2 == 0 else f"rank {rank - 1}, which leads"):
        sr.connect("nowhere.invalid:1", mesh=mesh, deadline_sec=1.0)


CASES = {
    by_ddp: 2,
    save_whole: 2,
    by_tensor: 4,
    by_both: 4,
    save_in_parts: 4,
    go_on_by_fsdp: 2,
    go_on_by_ddp: 2,
    go_on_in_groups: 4,
    towers_of_jobs: 4,
    refusals: 4,
    meshes: 4,
}


def main(rank: int, address: str, folder: str) -> None:
    """One rank: every case in turn, in a process group of as many ranks as the case has."""
    torch.set_num_threads(1)
    for case, world in CASES.items():
        if rank >= world:
            continue
        meet = f"file://{folder}/meet-{case.__name__}"
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world, timeout=timedelta(seconds=60))
        case(rank, address, Path(folder))
        dist.barrier()
        dist.destroy_process_group()
    with open(f"{folder}/done{rank}", "w") as file:
        file.write("done")


@pytest.fixture(scope="module")
def cluster() -> Iterator[sr.LocalCluster]:
    with sr.local_cluster(shards=2) as running:
        yield running


@pytest.fixture(scope="module")
def folder(cluster: sr.LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the cases left."""
    made = tmp_path_factory.mktemp("cases")
    run_ranks(__file__, 4, cluster.address, made, deadline_sec=150)
    return made


def losses_of(folder: Path, case: Callable[[int, str, Path], None]) -> dict[int, tuple[int, list[float]]]:
    """(worker, losses) by rank."""
    return {rank: torch.load(folder / f"{case.__name__}{rank}.pt") for rank in range(CASES[case])}


def assert_as_ddp(folder: Path, case: Callable[[int, str, Path], None], begin: int = 0) -> None:
    wanted = dict(losses_of(folder, by_ddp).values())
    for rank, (worker, losses) in losses_of(folder, case).items():
        np.testing.assert_allclose(losses, wanted[worker][begin:], rtol=0, atol=1e-6, err_msg=f"rank {rank}")


def rows_of(cluster: sr.LocalCluster, namespace: str) -> np.ndarray:
    with sr.connect(cluster.address, namespace, job="reader") as session:
        return np.concatenate([session.table(name).pull(np.arange(ROWS)) for name in ("one", "bag")])


@pytest.mark.parametrize("case", [by_tensor, by_both])
def test_towers_in_parts_train_as_with_ddp(cluster: sr.LocalCluster, folder: Path, case) -> None:
    assert_as_ddp(folder, case)
    rows = rows_of(cluster, case.__name__.removeprefix("by_"))
    np.testing.assert_allclose(rows, rows_of(cluster, "ddp"), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", [go_on_by_fsdp, go_on_by_ddp, go_on_in_groups])
def test_a_dense_side_goes_on_on_other_ranks(folder: Path, case) -> None:
    assert_as_ddp(folder, case, HALF)


def test_parts_are_written_before_the_manifest_and_checked(cluster: sr.LocalCluster, folder: Path) -> None:
    saved, place = next((folder / "parts").glob("save-*")), Folder(str(folder / "parts"))
    chain = [manifest.read_manifest(place, saved.name)]
    files = sorted((saved / "dense").iterdir())
    assert len(files) == 4
    assert max(file.stat().st_mtime_ns for file in files) < (saved / "manifest.json").stat().st_mtime_ns
    whole = manifest.verify(place, chain)
    assert whole > sum(file.stat().st_size for file in files)
    damage(files[1])
    with pytest.raises(sr.errors.DataLoss, match=files[1].name):
        manifest.verify(place, chain)
    with sr.connect(cluster.address, "parts") as session:
        model = distributed(session)
        before = {name: value.clone() for name, value in model.named_parameters()}
        with pytest.raises(sr.errors.DataLoss, match=files[1].name):
            session.restore(str(folder / "parts"), model=model)
        assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


def test_a_whole_copy_is_published(folder: Path) -> None:
    """The case ``by_both`` compares its scores."""
    (program,) = (folder / "models").rglob("*.pt2")
    assert program.stat().st_size > 0


def test_refusals_end_the_same_call_on_every_rank(folder: Path) -> None:
    """The checks are in the cases: ``towers_of_jobs``, ``refusals`` and ``meshes``."""
    assert len(list(folder.glob("done?"))) == 4


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


if __name__ == "__main__":  # one rank of a test
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
