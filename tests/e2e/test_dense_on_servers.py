"""Dense tensors on the servers, with real processes: jobs train; workers die, join a running job and come back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sparserow as sr
from long_form import FULL
from sparserow.worker.data import write_click_log
from sparserow.worker.layers import shared_buffers
from sparserow.worker.session.namespace_file import NamespaceFile
from sparserow_process import DEADLINE_SEC, Launcher, wait_until


@pytest.fixture(scope="module")
def cluster() -> Iterator[sr.LocalCluster]:
    with sr.local_cluster(shards=2) as made:
        yield made


JOBS = Path(__file__).resolve().parents[2] / "deploy" / "jobs"


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return write_click_log(tmp_path_factory.mktemp("log"), rows=20_000, test_rows=4_000, seed=3)


def start(launcher: Launcher, log, result: Path, *sets: str):
    settings = [
        f"data.train={log.train}",
        f"data.test={log.test}",
        "model.args.rows={'*': 200000}",
        "train.batch_size=256",
    ]
    settings += ["train.threads=1", "train.workers=2", "train.dense=ps", *sets]
    assigned = [part for setting in settings for part in ("--set", setting)]
    return launcher.start("train", str(JOBS / "demo.yaml"), *assigned, "--json", str(result))


@pytest.mark.full("the next test trains such a job too")
@pytest.mark.parametrize("staleness", ["4", "0", "null"])
def test_a_job_trains_without_a_process_group(launcher, log, tmp_path, staleness):
    result = tmp_path / "result.json"
    run = start(launcher, log, result, f"train.staleness={staleness}")
    assert run.popen.wait(600) == 0, run.err
    figures = json.loads(result.read_text())
    assert 0.62 < figures["test_auc"] < log.bayes_auc
    assert (figures["workers"], figures["shards"]) == (2, 2)
    assert figures["history"][0]["samples"] == 20_000
    assert {"dense", "embeddings.tables.C1"} <= figures["staleness"].keys()
    bounds = {bound for buckets in figures["staleness"].values() for bound in buckets}
    assert bounds >= {"0"}
    assert staleness == "null" or max(map(int, bounds)) <= int(staleness)
    assert not launcher.living()


def test_a_killed_worker_is_given_up_and_the_job_goes_on(launcher, log, tmp_path):
    result = tmp_path / "result.json"
    run = start(launcher, log, result, "train.staleness=4", "train.epochs=6", "cluster.worker_lease=10s")
    run.wait_for("epoch 2/6")
    workers = [p for p in launcher.living() if any("worker_process" in part for part in p.cmdline())]
    max(workers, key=lambda process: process.pid).kill()  # worker 1: the second that was started
    assert run.popen.wait(600) == 4, run.err
    assert "workers lost" in run.out
    assert "worker 1 ended by signal 9; its messages are on stderr; the other workers continue" in run.err
    figures = json.loads(result.read_text())
    assert (figures["workers"], figures["workers_lost"]) == (1, 1)
    assert len(figures["history"]) == 6
    assert figures["test_auc"] > 0.62
    wait_until(lambda: not launcher.living(), "no process is left")


def test_workers_wait_for_an_evaluation_that_is_longer_than_their_deadline(tmp_path: Path) -> None:
    """The deadline is 4 s here, and the evaluation takes 9: ten batches, each of them in time."""
    log = write_click_log(tmp_path, rows=4_000, test_rows=2_000, seed=3)
    path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    with sr.local_cluster(shards=1, worker_lease="3s") as cluster:
        arguments = ["tests", cluster.address, str(log.train), str(log.test)]
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, *arguments, str(rank)], env=path, stderr=subprocess.PIPE, text=True
            )
            for rank in range(2)
        ]
        try:
            for rank in ranks:
                error = rank.communicate(timeout=DEADLINE_SEC)[1]
                assert rank.returncode == 0, error
        finally:
            for rank in ranks:
                rank.kill()


def train_and_test_slowly(address: str, train: str, test: str, rank: str) -> None:
    """One worker of a job, whose worker 0 tests ten batches, one a second."""
    from sparserow.deploy.train import training_run
    from sparserow.proto.config.job import JobConfig
    from sparserow.proto.options.document import validate
    from sparserow.worker.training import job_readers
    from sparserow.worker.training.batch_placement import BatchPlacement
    from sparserow.worker.training.process_group import WorkerGroup
    from sparserow.worker.training.training_report import Silence

    training_run._APART_DEADLINE_SEC = 4.0
    job_readers._TEST_BATCH = 200
    placed = BatchPlacement.placed

    def slowly(self, batch, *, train=False):
        if not train:
            time.sleep(1)
        return placed(self, batch, train=train)

    BatchPlacement.placed = slowly
    model = {"class": "DLRM", "args": {"rows": {"*": 1000}, "dim": 4, "bottom": [4], "top": [4]}, "min_rows": 1}
    settings = {"dense": "ps", "staleness": 2, "epochs": 2, "batch_size": 256, "threads": 1}
    data = {"format": "criteo", "train": train, "test": test}
    tree = {"name": "apart", "data": data, "model": model, "train": settings, "publish": {"local": None}}
    job = validate(JobConfig, {**tree, "cluster": {"address": address}})
    group = WorkerGroup(int(rank), 2, meets=False)
    training_run.run_worker(job, group, local_world=2, coordinator=address, observer=Silence())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.backend=local", "train.dense: needs model.backend ps, as local has no servers"),
        (
            "train.parallel={shard: optimizer}",
            "train.parallel: needs train.dense ddp, as the tower of ps is on the servers",
        ),
        ("train.clip_norm=1", "train.clip_norm: needs train.dense ddp"),
        ("train.clip_row_norm=1", "train.clip_row_norm: needs train.dense ddp"),
        ("train.dense_optimizer.kind=lion", "train.dense_optimizer.kind: 'lion' is not allowed; allowed: adam, adamw"),
    ],
)
def test_what_it_cannot_do_is_one_line(launcher, log, tmp_path, setting, message):
    assert message in start(launcher, log, tmp_path / "result.json", setting).error_line()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 4)
        self.tower = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tower(self.table(ids)).squeeze(1)


def work(address: str, rank: str, world: str, staleness: str, folder: str) -> None:
    """A user's script: trains until told to stop, and notes each step with its loss."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    bound = None if staleness == "null" else int(staleness)
    with (
        sr.connect(address, "crew", rank=int(rank), world_size=int(world), staleness=bound) as session,
        (Path(folder) / f"rank{rank}").open("w") as notes,
    ):
        model = session.distribute(Net(), optimizer=sr.optim.SGD(lr=0.2), min_rows=10)
        session.dense_on_servers(model, optimizer=sr.optim.SGD(lr=0.02))
        generator = torch.Generator().manual_seed(int(rank))
        while not (Path(folder) / "stop").exists():
            ids = torch.randint(0, 64, (32,), generator=generator)
            loss = ((model(ids) - (ids % 2)) ** 2).mean()
            loss.backward()
            step = session.current_step
            assert session.step()
            print(step, float(loss), file=notes, flush=True)
            time.sleep(0.005)


class Crew:
    """Workers of one job, each a process."""

    def __init__(self, address: str, staleness: str, folder: Path) -> None:
        self._address, self._staleness, self._folder = address, staleness, folder
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def start(self, rank: int, world: int) -> None:
        (self._folder / f"rank{rank}").unlink(missing_ok=True)
        arguments = [self._address, str(rank), str(world), self._staleness, str(self._folder)]
        self.processes[rank] = subprocess.Popen(
            [sys.executable, __file__, *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")},
        )

    def steps(self, rank: int) -> list[tuple[int, float]]:
        notes = self._folder / f"rank{rank}"
        lines = notes.read_text().splitlines(keepends=True) if notes.exists() else []
        pairs = [line.split() for line in lines if line.endswith("\n")]
        return [(int(step), float(loss)) for step, loss in pairs]

    def wait_for_more(self, rank: int, count: int) -> None:
        before = len(self.steps(rank))
        wait_until(
            lambda: self.processes[rank].poll() is not None or len(self.steps(rank)) >= before + count,
            f"rank {rank} to make {count} more steps",
        )
        assert self.processes[rank].poll() is None, self.processes[rank].communicate()[1]

    def stop(self) -> None:
        (self._folder / "stop").touch()
        for rank, process in self.processes.items():
            if process.returncode is None:
                error = process.communicate(timeout=DEADLINE_SEC)[1]
                assert process.returncode == 0, f"rank {rank}: {error}"

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.mark.parametrize("staleness", ["3", *(["null"] if FULL else [])])
def test_workers_die_join_and_come_back_while_others_go_on(tmp_path: Path, staleness: str) -> None:
    with ExitStack() as stack:
        cluster = stack.enter_context(sr.local_cluster(shards=2, worker_lease="10s"))
        crew = Crew(cluster.address, staleness, tmp_path)
        stack.callback(crew.kill)
        crew.start(0, 2)
        crew.start(1, 2)
        crew.wait_for_more(0, 20)
        crew.start(2, 3)  # one more than the job began with
        crew.wait_for_more(2, 20)
        assert crew.steps(2)[0][0] >= 20 - 3
        crew.wait_for_more(0, 20)
        crew.processes[1].send_signal(signal.SIGKILL)
        crew.processes[1].communicate()
        last = crew.steps(1)[-1][0]
        crew.wait_for_more(0, 40)  # more than the bound lets through: rank 1 has left the clock
        crew.wait_for_more(2, 10)
        crew.start(1, 2)
        crew.wait_for_more(1, 20)
        assert crew.steps(1)[0][0] > last
        crew.wait_for_more(0, 20)
        numbers = [step for step, _ in crew.steps(0)]
        assert numbers == list(range(len(numbers)))  # rank 0 never went back
        crew.stop()
        losses = [loss for _, loss in crew.steps(0)]
        assert sum(losses[-10:]) / 10 < 0.7 * losses[0]


def give_no_values(address: str) -> None:
    """Rank 0 of a job, which dies before it gives the initial values."""
    sr.connect(address, "orphans", rank=0, world_size=2, staleness=3)
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_next_rank_gives_the_initial_values_when_rank_0_dies_before() -> None:
    with sr.local_cluster(shards=1, worker_lease="10s") as cluster:
        path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
        first = subprocess.Popen([sys.executable, __file__, "orphans", cluster.address], env=path)
        try:
            with sr.connect(cluster.address, "orphans", rank=1, world_size=2, staleness=3) as session:
                torch.manual_seed(7)
                model = session.distribute(Net(), optimizer=sr.optim.SGD(lr=0.2), min_rows=10)
                mine = model.tower.weight.detach().clone()
                session.dense_on_servers(model, optimizer=sr.optim.SGD(lr=0.02))
                torch.testing.assert_close(model.tower.weight.detach(), mine, rtol=0, atol=0)
                model(torch.arange(8)).sum().backward()
                assert session.step()
            assert first.wait(DEADLINE_SEC) == -signal.SIGKILL
        finally:
            first.kill()


class Normal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 4)
        self.norm = nn.BatchNorm1d(4)
        self.tower = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tower(self.norm(self.table(ids))).squeeze(1)


def train_normal(session: sr.Session, steps: int) -> Normal:
    torch.manual_seed(3)
    model = session.distribute(Normal(), optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
    session.dense_on_servers(model, optimizer=sr.optim.SGD(lr=0.1))
    for step in range(steps):
        ids = torch.randint(0, 64, (32,), generator=torch.Generator().manual_seed(step))
        ((model(ids) - 3) ** 2).mean().backward()
        session.step()
    return model


def train_and_die(address: str) -> None:
    """Rank 0 of a job, which is killed a second after its buffers changed."""
    session = sr.connect(address, "normal", rank=0, world_size=2, staleness=8)
    model = train_normal(session, 5)
    print(" ".join(map(str, model.norm.running_mean.tolist())), flush=True)
    time.sleep(1.1)
    session.step(allow_empty=True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_who_takes_the_place_of_another_has_its_buffers(tmp_path: Path) -> None:
    with sr.local_cluster(shards=2, worker_lease="10s") as cluster:
        path = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
        first = subprocess.Popen(
            [sys.executable, __file__, "normal", cluster.address], env=path, stdout=subprocess.PIPE, text=True
        )
        try:
            with sr.connect(cluster.address, "normal", rank=1, world_size=2, staleness=8) as other:
                assert other.rank == 1
                said = first.communicate(timeout=DEADLINE_SEC)[0].split()
                assert first.returncode == -signal.SIGKILL
                before = torch.tensor([float(each) for each in said])
                assert before.abs().min() > 0
                with sr.connect(cluster.address, "normal", rank=0, world_size=2, staleness=8) as session:
                    model = train_normal(session, 0)
                    torch.testing.assert_close(model.norm.running_mean, before, rtol=0, atol=0)
                    assert int(model.norm.num_batches_tracked) == 5
        finally:
            first.kill()


def test_buffers_go_on_with_the_rows_of_their_namespace(cluster: sr.LocalCluster, tmp_path: Path) -> None:
    with sr.connect(cluster.address, "next", staleness=2) as session:
        before = train_normal(session, 5).norm
        session.save(str(tmp_path / "saves"), wait=True)  # of the rows alone
    with sr.connect(cluster.address, "next", staleness=2) as session:
        model = train_normal(session, 0)
        assert int(model.norm.num_batches_tracked) == 5
        torch.testing.assert_close(model.norm.running_var, before.running_var, rtol=0, atol=0)
        train_normal_more(model, session, 3)
        assert int(model.norm.num_batches_tracked) == 8
        session.restore(str(tmp_path / "saves"))
        assert int(model.norm.num_batches_tracked) == 5
        torch.testing.assert_close(model.norm.running_var, before.running_var, rtol=0, atol=0)
        version = session.publish("rows", root=str(tmp_path / "models"))
        tables = json.loads((Path(version.url) / "manifest.json").read_text())["tables"]
        assert sorted(table["schema"]["name"] for table in tables) == ["dense", "table"]


def train_normal_more(model: nn.Module, session: sr.Session, steps: int) -> None:
    model.train()
    for _ in range(steps):
        model(torch.arange(16)).sum().backward()
        session.step()


def test_buffers_that_cannot_be_written_end_no_step(
    cluster: sr.LocalCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As while the coordinator is being restarted: the step is done, and they are written a second later."""
    monkeypatch.setattr(shared_buffers, "_EVERY_SEC", 0.0)
    with sr.connect(cluster.address, "away", staleness=2) as session:
        model = train_normal(session, 1)
        with monkeypatch.context() as away:
            away.setattr(NamespaceFile, "write", lambda *_: (_ for _ in ()).throw(sr.errors.Unavailable("it is away")))
            train_normal_more(model, session, 2)
        assert caplog.text.count("the newest buffers were not written: it is away") == 2
        train_normal_more(model, session, 1)
        session.drop_table("dense.buffers.safetensors")  # the write after the next makes it anew
        train_normal_more(model, session, 2)
    with sr.connect(cluster.address, "away", staleness=2) as session:
        assert int(train_normal(session, 0).norm.num_batches_tracked) == 6


def test_buffers_that_are_not_there_are_refused_by_name(cluster: sr.LocalCluster) -> None:
    with sr.connect(cluster.address, "lost", staleness=2) as session:
        train_normal(session, 2)
    with sr.connect(cluster.address, "lost", staleness=2) as session:
        session.drop_table("dense.buffers.safetensors")
        with pytest.raises(
            sr.errors.FailedPrecondition, match=r"not its buffers \(norm.running_mean, norm.running_var, .*anew"
        ):
            train_normal(session, 0)


if __name__ == "__main__":
    roles = {"orphans": give_no_values, "normal": train_and_die, "tests": train_and_test_slowly}
    roles[sys.argv[1]](*sys.argv[2:]) if sys.argv[1] in roles else work(*sys.argv[1:])
