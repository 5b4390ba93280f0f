"""Tables on the devices of gloo ranks, with real processes: bit for bit what tables on servers become."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import sparserow as sr
from forked_ranks import check_case, fork_cases
from sparserow.cpp_ext.device.link import HostLink
from sparserow.deploy.train.placements import placements_of
from sparserow.proto.checkpoint import manifest
from sparserow.proto.checkpoint.folder import Folder as CheckpointFolder
from sparserow.proto.config.job import JobConfig
from sparserow.proto.control import ControlClient
from sparserow.proto.options.document import load_config
from sparserow.worker.membership.shard_client import shard_client
from sparserow.worker.training.process_group import WorkerGroup
from sparserow.worker.training.ps_backend import PsBackend
from sparserow.worker.training.trainer import Trainer
from sparserow.worker.training.training_report import Silence
from sparserow_process import run_ranks, wait_until

ROWS, DIM, STEPS, MICRO = 61, 8, 30, 2
KINDS = {
    "sgd": sr.optim.SGD(lr=0.5, momentum=0.9, weight_decay=1e-3),
    "adagrad": sr.optim.Adagrad(lr=0.3, initial_accumulator=0.1),
    "rowwise": sr.optim.RowWiseAdagrad(lr=0.3),
    "adam": sr.optim.Adam(lr=0.05, weight_decay=1e-3),
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
    return session.distribute(
        Net(),
        optimizer=sr.optim.SGD(lr=1.0),
        min_rows=1,
        tables={name: sr.Table(optimizer=KINDS[name], placement=placement) for name in TABLES},
        **options,
    )


def train(
    session: sr.Session,
    model: nn.Module,
    steps: range = range(STEPS),
    *,
    dense: torch.optim.Optimizer | None = None,
    scaler: torch.amp.GradScaler | None = None,
    **options: object,
) -> list[float]:
    dense = dense or torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in steps:
        for micro in range(MICRO):
            *inputs, labels = batch(2 * step + micro, session.rank)
            loss = nn.functional.mse_loss(model(*inputs), labels)
            (loss * 64 if scaler is None else scaler.scale(loss)).backward()
            losses.append(loss.item())
        assert session.step(dense, scaler, **options)
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
        keys = torch.cat([mine.share.keys_of(rank) for rank in range(mine.share.world)]).argsort()
        told: list = [None] * mine.share.world
        dist.all_gather_object(told, (mine.weights, mine.state, mine.update_counts.unsqueeze(1)))
        weights, state, counts = (torch.cat(parts)[keys].numpy() for parts in zip(*told, strict=True))
        found[name] = [weights, np.where(counts > 0, state, 0), counts[:, 0]]
    return found


def bits(rank: int, address: str, folder: Path) -> None:
    """Every optimizer, 30 steps, on servers and on devices."""
    world = dist.get_world_size()
    seen = {}
    for placement in ("servers", "device"):
        scale = "sum" if world == 4 else "mean"
        with sr.connect(address, f"{placement}{world}", grad_scale=scale) as session:
            model = make(session, placement)
            scaler = torch.amp.GradScaler("cpu", init_scale=48.0, growth_interval=9) if world == 2 else None
            most = 0.5 if scaler else 30.0
            losses = train(session, DistributedDataParallel(model), scaler=scaler, clip_row_norm=most)
            dist.barrier()  # an evaluation reads the newest rows, so the other ranks' commits have to be there
            model.eval()
            with torch.no_grad():
                scores = model(*batch(7, rank)[:-1])
            stats = session.stats()
            assert stats.clipped_rows > 0
            assert stats.device_tables == (4 if placement == "device" else 0)
            rows = rows_on_devices(session) if placement == "device" else rows_on_servers(session)
            seen[placement] = (losses, scores.tolist(), rows)
            dist.barrier()
    assert seen["device"][0] == seen["servers"][0]
    assert seen["device"][1] == seen["servers"][1]
    for name in TABLES:
        for what, here, there in zip(
            ("weights", "state", "counts"), seen["device"][2][name], seen["servers"][2][name], strict=True
        ):
            if what == "state":
                there = np.where(seen["servers"][2][name][2][:, None] > 0, there, 0)
            assert np.array_equal(here, there), (name, what)


def failures(rank: int, address: str, folder: Path) -> None:
    """What ends a step or a forward of two ranks without a change of rows."""
    with sr.connect(address, "failures", deadline_sec=20.0) as session:
        free = HostLink.free_bytes
        HostLink.free_bytes = lambda self: 900 if rank else free(self)
        kind = sr.errors.InvalidArgument if rank else sr.errors.FailedPrecondition
        with pytest.raises(kind, match=r"rank 1 needs 2\d+ bytes for its 3\d of 61 rows and state, and 900 bytes are"):
            make(session, "device")
        HostLink.free_bytes = free
        model = make(session, "device")
        *inputs, _ = batch(0, rank)
        train(session, model, range(1))
        before = rows_on_devices(session)

        def unchanged(step: int = 1) -> None:
            session.discard()
            after = rows_on_devices(session)
            assert session.current_step == step
            for name in TABLES:
                assert all(map(np.array_equal, before[name], after[name])), name

        (model(*inputs).sum() * (float("nan") if rank else 1.0)).backward()
        with pytest.raises(
            sr.NonFiniteGradient, match=r"table 'failures/sgd': the gradient of key" if rank else r"of another rank"
        ):
            session.step()
        unchanged()
        model(*inputs).sum().backward()
        session.discard()
        with pytest.raises(sr.errors.FailedPrecondition, match=r"no backward reached a distributed table"):
            session.step()
        unchanged()

        matrix = session.core.device_tables.table("adam").matrix
        if rank:  # the memory of this rank's device is not enough for the step
            matrix.step = lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("5 bytes"))
        model(*inputs).sum().backward()
        wrong = "table 'adam': the memory of cpu was not enough" if rank else "another rank's commit was refused"
        with pytest.raises(sr.errors.FailedPrecondition, match=wrong):
            session.step()
        vars(matrix).pop("step", None)
        unchanged()

        late = model.sgd(inputs[0])
        session.discard()
        with pytest.raises(sr.errors.FailedPrecondition, match="call backward before session"):
            late.sum().backward()
        model.sgd(inputs[0]).sum().backward()
        session.step()
        before = rows_on_devices(session)

        kind, text = (sr.errors.InvalidArgument, "id 61 is not allowed; allowed: .0, 61")
        if not rank:
            kind, text = (sr.errors.FailedPrecondition, "a lookup of table 'sgd': rank 1 could not take part")
        with pytest.raises(kind, match=text):
            model.sgd(inputs[0] if rank == 0 else inputs[0] + ROWS - inputs[0].min())
        mine = "table 'adagrad', rank 0 is in a lookup of table 'sgd'" if rank else "table 'sgd', rank 1 is in a lookup"
        with pytest.raises(sr.errors.FailedPrecondition, match=f"rank {rank} is in a lookup of {mine}"):
            model.adagrad(inputs[1]) if rank else model.sgd(inputs[0])
        calls = ["session.step", "a lookup of table 'sgd'"]
        call = [lambda: session.step(allow_empty=True), lambda: model.sgd(inputs[0])][rank]
        wanted = f"rank {rank} is in {calls[rank]}, rank {1 - rank} is in {calls[1 - rank]}; every rank makes the same"
        with pytest.raises(sr.errors.FailedPrecondition, match=wanted):
            call()
        unchanged(2)

        with pytest.raises(sr.errors.FailedPrecondition, match="tables of placement 'device' cannot join"):
            Join([session])
        with pytest.raises(
            sr.errors.FailedPrecondition, match="'sgd' has placement 'device': its rows are on the devices"
        ):
            session.table("sgd")
        with pytest.raises(
            sr.errors.FailedPrecondition, match="table 'sgd' has placement 'device', whose ranks step together"
        ):
            session.dense_on_servers(model, optimizer=sr.optim.SGD(lr=1.0))

        scores = model(*inputs)
        assert torch.equal(sr.copy_sharing_rows(model)(*inputs), scores)
        assert torch.equal(torch.compile(model, backend="eager")(*inputs), scores)
        with torch.no_grad():
            assert torch.equal(model(*inputs), scores)
        wrapped = session.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
        model(*inputs).sum().backward()
        wrapped.zero_grad()
        session.step(allow_empty=True)
        unchanged(3)
        train(session, model, range(3, 5))
        dist.barrier()


def lost(rank: int, address: str, folder: Path) -> None:
    """Two ranks save after five steps; one is killed at the eighth, and the other one hears of it."""
    with sr.connect(address, "lost", deadline_sec=20.0) as session:
        model = DistributedDataParallel(make(session, "device"))
        dense = torch.optim.Adam(model.parameters(), lr=0.01)
        train(session, model, range(5), dense=dense)
        session.save(str(folder / "saves"), model=model, optimizer=dense)
        train(session, model, range(5, 8), dense=dense)
        dist.barrier()
        if rank:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(
            sr.errors.Unavailable, match=r"a rank of the job is gone .* goes on from its last checkpoint"
        ):
            train(session, model, range(8, 10), dense=dense)
        session.discard()


def late(rank: int, address: str, folder: Path) -> None:
    """A rank that makes no lookup is waited for until the deadline, and then the session can only be closed."""
    with sr.connect(address, "late", deadline_sec=1.5) as session:
        model = make(session, "device")
        ids = batch(0, rank)[0]
        model.sgd(ids)
        if rank == 0:
            for _ in range(2):
                with pytest.raises(sr.errors.DeadlineExceeded, match="a rank of the job did not take part in time"):
                    model.sgd(ids)
        dist.barrier()
        if rank:
            with pytest.raises(sr.errors.SparserowError, match="can only be closed"):
                model.sgd(ids)
        session.discard()
        dist.barrier()


def resumed(rank: int, address: str, folder: Path) -> None:
    """The job goes on from its checkpoint, and does what a job does that nothing disturbed."""
    ends = []
    for namespace in ("lost", "undisturbed"):
        with sr.connect(address, namespace, gather_sec=60.0) as session:
            model = DistributedDataParallel(make(session, "device"))
            dense = torch.optim.Adam(model.parameters(), lr=0.01)
            if namespace == "lost":
                assert session.restore(str(folder / "saves"), model=model, optimizer=dense).step == 4
            else:
                train(session, model, range(5), dense=dense)
            ends.append((train(session, model, range(5, 12), dense=dense), rows_on_devices(session)))
            dist.barrier()
    assert ends[0][0] == ends[1][0]
    for name in TABLES:
        assert all(map(np.array_equal, ends[0][1][name], ends[1][1][name])), name


def saved_by_four(rank: int, address: str, folder: Path) -> None:
    """A checkpoint of four ranks; a save that fails on one of them leaves none."""
    with sr.connect(address, "four") as session:
        model = make(session, "device")
        train(session, model, range(4))
        saved = session.save(str(folder / "four"), model=model)
        if rank == 0:
            torch.save(rows_on_devices(session), folder / "rows of four.pt")
        else:
            rows_on_devices(session)
        write, failing, slow = CheckpointFolder.write, "worker.2.safetensors", "worker.3.safetensors"

        def refuse(self: CheckpointFolder, name: str, *rest: object) -> str:
            if name == failing:
                raise sr.errors.ResourceExhausted("the disk is full")
            if name == slow:
                wait_until(lambda: not Path(self.path_of(name)).parent.exists(), "the failed save is removed")
            return write(self, name, *rest)

        CheckpointFolder.write = refuse
        with pytest.raises(sr.errors.SparserowError, match="disk is full"):
            session.save(str(folder / "four"), model=model)
        dist.barrier()
        assert manifest.list_names(CheckpointFolder(str(folder / "four"))) == [saved.name]


def restored_by_two(rank: int, address: str, folder: Path) -> None:
    """Two ranks take the rows of four; what does not fit the checkpoint is refused before anything is changed."""
    url = str(folder / "four")
    with sr.connect(address, "four", job="two", gather_sec=60.0) as session:
        with pytest.raises(
            sr.errors.FailedPrecondition, match="has table four/sgd on the devices of ranks, and this session"
        ):
            session.restore(url)
        model = make(session, "device")
        train(session, model, range(1))
        session.restore(url, model=model)
        wanted = torch.load(folder / "rows of four.pt", weights_only=False)
        found = rows_on_devices(session)
        for name in TABLES:
            assert all(map(np.array_equal, wanted[name], found[name])), name
        train(session, model, range(1, 2))
        dist.barrier()
    with sr.connect(address, "four", job="others", gather_sec=60.0) as session:
        torch.manual_seed(9)
        other = session.distribute(
            Net(),
            optimizer=sr.optim.SGD(lr=1.0),
            min_rows=1,
            tables={"*": sr.Table(placement="device")},
        )
        before = rows_on_devices(session)
        with pytest.raises(sr.errors.FailedPrecondition, match=r"table four/sgd of .* has optimizer .*momentum"):
            session.restore(url, model=other)
        for name in TABLES:
            assert all(map(np.array_equal, before[name], rows_on_devices(session)[name])), name
        session.restore(url, model=other, accept=["*.optimizer"])
        after = rows_on_devices(session)
        for name in TABLES:
            assert np.array_equal(after[name][0], wanted[name][0])
            assert not after[name][2].any()
        dist.barrier()
    with sr.connect(address, "fresh", job="fresh", gather_sec=60.0) as session:
        model = make(session, "device")
        with pytest.raises(sr.errors.FailedPrecondition, match="has table four/sgd on the devices"):
            session.restore(url)
        session.restore(url, renames={f"four/{name}": f"fresh/{name}" for name in TABLES})
        found = rows_on_devices(session)
        for name in TABLES:
            assert np.array_equal(found[name][0], wanted[name][0])
        dist.barrier()


class Small(nn.Module):
    """A model that can be exported."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(ROWS, DIM, padding_idx=3)
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode="mean")
        self.top = nn.Linear(2 * DIM, 1)

    def forward(self, ids: Tensor, bags: Tensor) -> Tensor:
        return self.top(torch.cat([self.one(ids), self.bag(bags)], dim=1)).flatten()


def published(rank: int, address: str, folder: Path) -> None:
    """Models whose tables are on devices, all of them or one: the first one follows by dense weights."""
    root, example = str(folder / "models"), batch(0, 9)[:2]
    for name, tables in (("all", "*"), ("mixed", "one")):
        with sr.connect(address, name, wire_dtype="bfloat16" if name == "all" else "float32") as session:
            torch.manual_seed(4)
            options = {tables: sr.Table(placement="device")}
            model = session.distribute(Small(), optimizer=sr.optim.Adagrad(lr=0.5), min_rows=1, tables=options)
            ddp = DistributedDataParallel(model)
            dense = torch.optim.Adam(model.parameters(), lr=0.1)

            def steps(begin: int, session=session, ddp=ddp, dense=dense) -> None:
                for step in range(begin, begin + 3):
                    ids, bags, *_, labels = batch(step, rank)
                    nn.functional.mse_loss(ddp(ids, bags), labels).backward()
                    session.step(dense)

            steps(0)
            if rank == 0:
                with pytest.raises(
                    sr.errors.FailedPrecondition, match=r"layer 'one' is on the devices .* session\.gather_tables"
                ):
                    session.publish(name, model=model, example=example, root=root)
            whole = session.gather_tables(ddp)
            assert (whole is None) == (rank == 1)
            rows = model.one(torch.arange(ROWS))
            assert whole is None or torch.equal(whole.one.weight, rows)  # the dtype of the wire is that of servers
            session.discard()
            if whole is not None:
                session.publish(name, model=whole, example=example, root=root)
                publisher = sr.DensePublisher(session, name, root=root, model=whole)
            dist.barrier()
            if name == "all":
                steps(3)
                again = session.gather_tables(ddp, into=whole)
                if again is not None:
                    assert again is whole
                    assert publisher.publish().number == 1
            scores = model.eval()(*example)
            if rank == 0:
                torch.save(scores.detach(), folder / f"scores of {name}.pt")
                with pytest.raises(sr.errors.InvalidArgument, match="into: 'Linear' is not allowed"):
                    session.gather_tables(model, into=nn.Linear(1, 1))
            else:
                session.gather_tables(model)
            dist.barrier()


def jobs(rank: int, address: str, folder: Path) -> None:
    """A job file with ``tables.NAME.placement`` has the results of the same job with its tables on servers."""
    log = folder / f"log{rank}.csv"
    draw = torch.Generator().manual_seed(0)
    keys = torch.randint(0, 50, (333,), generator=draw).tolist()
    log.write_text("".join(f"{(key + at) % 2},{at % 7 / 7},k{key}\n" for at, key in enumerate(keys)))
    group = WorkerGroup(rank, 2)
    common = [
        f"data.train={log}",
        f"data.test={log}",
        "data.format=csv",
        "data.csv={columns: [y, x, c], label: y}",
        "features={x: {kind: dense}, c: {kind: id}}",
        "model={class: DeepFM, args: {rows: {'*': 64}, dim: 4, hidden: [8], init_scale: 0.5}, min_rows: 1}",
        "name=jobs",
        "train={batch_size: 32, accumulate: 2, epochs: 2, workers: 2}",
        "train.row_optimizer={kind: adam, lr: 0.05}",
    ]
    saves = f"train.checkpoint={{url: {folder}/job-saves, every_steps: 2}}"
    sets: dict[str, tuple[str, ...]] = {
        "servers": (),
        "device": ("tables={'*.c': {placement: device}}", saves),
        "again": ("tables={'*.c': {placement: device}}", saves),
        "auto": ("tables={'*.c': {placement: auto}}", "train.prefetch=1"),
    }
    results = {}
    for name, more in sets.items():
        job = load_config(JobConfig, None, [*common, *more])
        with sr.connect(address, "jobs", gather_sec=60.0) as session:
            backend = PsBackend(job, session, address, choose=placements_of(job, group, 2))
            resume = "auto" if name == "again" else "never"
            trainer = Trainer(job, group=group, backend=backend, observer=Silence(), resume=resume)
            result = trainer.run()
            assert trainer.is_resumed == (name == "again")
            seen = [(each.train_loss, each.test_auc, each.test_log_loss) for each in result.history]
            source = trainer.exported(trainer.model)
            direct = source.model.eval()(*source.example).tolist()
            host = trainer.model_on_host().eval()
            if rank == 0:
                there = trainer.exported(host)
                np.testing.assert_allclose(there.model(*there.example).tolist(), direct, rtol=1e-6)
            results[name] = seen
            assert session.stats().device_tables == (0 if name == "servers" else len(session.core.bound_tables()))
            assert result.rows == (result.rows if name == "servers" else 64 * len(session.core.bound_tables()))
            group.wait("peers")
        if name == "servers":
            if rank == 0:
                with sr.connect(address, "jobs", job="cleaner", rank=0, world_size=1) as session:
                    for schema in session.core.catalog.list_tables("jobs"):
                        session.drop_table(schema.name)
            group.wait("peers")
    for name in ("device", "again", "auto"):
        np.testing.assert_allclose(results[name], results["servers"], rtol=1e-14, err_msg=name)  # sums of numpy


CASES: dict[str, tuple[int, Callable[[int, str, Path], None]]] = {
    **{f"bits of {world}": (world, bits) for world in (1, 2, 4)},
    "failures": (2, failures),
    "late": (2, late),
    "lost": (2, lost),
    "resumed": (2, resumed),
    "saved by four": (4, saved_by_four),
    "restored by two": (2, restored_by_two),
    "published": (2, published),
    "jobs": (2, jobs),
}
KILLED = {"lost": (1,)}


def main(address: str, folder: str, only: str = "") -> None:
    """Every case in turn, with as many ranks as it has."""
    fork_cases(CASES, address, folder, only, killed=KILLED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the cases left."""
    made = tmp_path_factory.mktemp("cases")
    with sr.local_cluster(shards=2) as cluster:
        run_ranks(__file__, 1, cluster.address, made, deadline_sec=150, interprets=False)
    return made


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_table_on_devices_has_the_bits_of_one_on_servers(folder: Path, world: int) -> None:
    check_case(folder, f"bits of {world}")


@pytest.mark.parametrize("case", [name for name in CASES if not name.startswith("bits")])
def test_tables_on_devices(folder: Path, case: str) -> None:
    check_case(folder, case)


@pytest.mark.parametrize("name", ["all", "mixed"])
def test_a_published_model_has_the_rows_of_devices(folder: Path, name: str) -> None:
    root, example = str(folder / "models"), batch(0, 9)[:2]
    with (
        sr.local_serving(name, root=root) as serving,
        sr.ServingClient(serving.addresses, model=name) as client,
        sr.ServedModel(client, root) as served,
    ):
        wanted = torch.load(folder / f"scores of {name}.pt")
        np.testing.assert_allclose(served(*example).tolist(), wanted.tolist(), rtol=1e-6, atol=1e-7)
        assert served.dense_version == (1 if name == "all" else 0)


if __name__ == "__main__":
    main(*sys.argv[2:])
