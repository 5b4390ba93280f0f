"""Towers in parts on CUDA: losses of the host within 1e-5, parts in a checkpoint, rows handed over by NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("sparserow.cpp_ext._client", reason="the native libraries are not built", exc_type=ImportError)
import sparserow as sr
from sparserow.worker.data import write_click_log
from sparserow.worker.models import mlp
from sparserow.worker.training.parallel_towers import average_in_backward, clip_parts, split_towers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROWS, DIM, STEPS, BATCH = 200, 8, 6, 32
JOB = str(Path(__file__).resolve().parents[2] / "deploy" / "jobs" / "demo.yaml")
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ROWS, DIM) for _ in range(3))
        self.top = mlp([3 * DIM, 16, 8, 1])

    def forward(self, ids: Tensor) -> Tensor:
        rows = [table(ids[:, at]) for at, table in enumerate(self.tables)]
        return self.top(torch.cat(rows, 1)).flatten()


def batch(step: int, worker: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(10 * step + worker)
    return torch.randint(0, ROWS, (BATCH, 3), generator=draw), torch.rand(BATCH, generator=draw).round()


def train(
    session: sr.Session,
    model: nn.Module,
    dense: torch.optim.Optimizer,
    where: torch.device,
    steps: range = range(STEPS),
    before_step: Callable[[], None] = lambda: None,
) -> list[float]:
    losses = []
    for step in steps:
        ids, labels = batch(step, session.rank)
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids), labels.to(where))
        loss.backward()
        before_step()
        assert session.step(dense)
        losses.append(float(loss.detach()))
    return losses


def made(session: sr.Session, where: torch.device) -> Net:
    torch.manual_seed(5)
    return session.distribute(Net(), optimizer=sr.optim.SGD(lr=1.0), min_rows=1).to(where)


def on_host(session: sr.Session) -> list[float]:
    """The losses of one worker on the host."""
    model = made(session, torch.device("cpu"))
    return train(session, model, torch.optim.Adam(model.parameters(), lr=0.01), torch.device("cpu"))


def fsdp(address: str, folder: Path, rank: int, world: int) -> None:
    """Parameters over all ranks, a checkpoint in the middle, and the same from there on."""
    from torch.distributed.fsdp import fully_shard

    where = torch.device("cuda", rank)
    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("data",))
    with sr.connect(address, f"fsdp{world}", mesh=mesh) as session:
        model = made(session, where)
        fully_shard(model, mesh=mesh)
        dense = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = train(session, model, dense, where, range(3))
        saved = session.save(str(folder / f"saved{world}"), model=model, optimizer=dense)
        assert saved.is_done()
        losses += train(session, model, dense, where, range(3, STEPS))
        dist.barrier()
    with sr.connect(address, f"fsdp{world}", job="again", mesh=mesh) as session:
        model = made(session, where)
        fully_shard(model, mesh=mesh)
        dense = torch.optim.Adam(model.parameters(), lr=0.01)
        session.restore(str(folder / f"saved{world}"), model=model, optimizer=dense)
        again = train(session, model, dense, where, range(3, STEPS))
        torch.testing.assert_close(again, losses[3:], rtol=1e-5, atol=1e-6)
        dist.barrier()
    if world == 1:
        with sr.connect(address, "host1") as session:
            torch.testing.assert_close(losses, on_host(session), rtol=1e-5, atol=1e-6)


def tensor(address: str, folder: Path, rank: int, world: int) -> None:
    """One group of two ranks, which has the losses of one worker; its gradients are averaged and clipped in parts."""
    where = torch.device("cuda", rank)
    mesh = init_device_mesh("cuda", (1, world), mesh_dim_names=("data", "tensor"))
    with sr.connect(address, "tensor2", mesh=mesh) as session:
        model = made(session, where)
        split_towers(model, mesh["tensor"])
        average_in_backward(model, mesh.get_group("data"), 1)
        dense = torch.optim.Adam(model.parameters(), lr=0.01)
        parameters = list(model.parameters())
        losses = train(session, model, dense, where, before_step=lambda: clip_parts(parameters, 1e6))
        dist.barrier()
    if rank == 0:
        with sr.connect(address, "host2", rank=0, world_size=1) as session:
            torch.testing.assert_close(losses, on_host(session), rtol=1e-5, atol=1e-6)
    dist.barrier()


def run(address: str, folder: Path, world: int, case: str) -> None:
    """Runs a case in as many processes as it has ranks; fails unless all end well in time."""
    command = [sys.executable, __file__, address, str(folder), str(world), case]
    ranks = [subprocess.Popen([*command, str(rank)], env=os.environ.copy()) for rank in range(world)]
    try:
        codes = [rank.wait(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * world


@pytest.mark.parametrize(
    ("world", "case"),
    [(1, "fsdp"), pytest.param(2, "fsdp", marks=TWO), pytest.param(2, "tensor", marks=TWO)],
)
def test_towers_in_parts_train_on_cuda_as_on_the_host(tmp_path: Path, world: int, case: str) -> None:
    with sr.local_cluster(shards=2) as cluster:
        run(cluster.address, tmp_path, world, case)


@TWO
@pytest.mark.parametrize("parallel", ["{tensor: 2}", "{shard: all}"])
def test_a_job_has_its_towers_in_parts_on_cuda(tmp_path: Path, parallel: str) -> None:
    log = write_click_log(tmp_path, rows=3_000, test_rows=701, seed=3)
    figures = {}
    for device in ("cpu", "cuda"):
        result = tmp_path / f"{device}.json"
        sets = [f"data.train={log.train}", f"data.test={log.test}", "publish.local=null", f"train.device={device}"]
        sets += [
            "model={class: DLRM, args: {rows: {'*': 5000}, dim: 8, bottom: [16], top: [16]}, min_rows: 1}",
            "train.clip_norm=0.5",
        ]
        sets += ["train.workers=2", f"train.parallel={parallel}", "train.batch_size=96", "train.prefetch=2"]
        command = [sys.executable, "-m", "sparserow.deploy.cli", "train", JOB, *(f"--set={each}" for each in sets)]
        subprocess.run([*command, "--json", str(result)], check=True, timeout=240)
        figures[device] = [epoch["train_loss"] for epoch in json.loads(result.read_text())["history"]]
    assert figures["cuda"] == pytest.approx(figures["cpu"], rel=1e-4)


if __name__ == "__main__":  # one rank of a case
    at, place, size, name, number = sys.argv[1:]
    torch.cuda.set_device(int(number))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        init_method=f"file://{place}/meet",
        rank=int(number),
        world_size=int(size),
        timeout=timedelta(seconds=120),
        device_id=torch.device("cuda", int(number)),
    )
    {"fsdp": fsdp, "tensor": tensor}[name](at, Path(place), int(number), int(size))
    dist.destroy_process_group()
