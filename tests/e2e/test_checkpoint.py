"""save and restore end to end: everything comes back bit for bit, onto any number of shards, and nothing is missing."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import sparserow as sr
from checkpoint_rows import rows_of_checkpoint
from sparserow.cpp_ext.torch_arrays import tensor_of
from sparserow.proto import control_pb2 as pb
from sparserow.proto.checkpoint import manifest as files
from sparserow.proto.checkpoint.folder import Folder
from sparserow.proto.checkpoint.state_tree import decode_tree
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound
from sparserow_process import wait_until

ROWS, DIM = 500, 4


@pytest.fixture(scope="module")
def cluster():
    with sr.local_cluster(shards=2, slot_count=64) as made:
        yield made


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(ROWS, DIM)
        self.top = nn.Sequential(nn.Linear(DIM, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.user(ids)).squeeze(-1)


class Reader:
    """Batches of ids; its state is where it is."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

    def take(self) -> torch.Tensor:
        self.at += 1
        return (torch.arange(32) * 7 + self.at * 13) % ROWS


class Training:
    """A whole worker: model, optimizers, scaler, schedulers, reader, all with state."""

    def __init__(self, session, namespace_seed: int = 0) -> None:
        torch.manual_seed(namespace_seed)
        self.session = session
        self.model = session.distribute(Model(), optimizer=sr.optim.Adagrad(lr=0.1), min_rows=100)
        self.dense = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
        self.schedules = [
            torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5) for optimizer in (self.dense, session.optimizer)
        ]
        self.reader = Reader()

    @property
    def parts(self):
        return {
            "model": self.model,
            "optimizer": self.dense,
            "scaler": self.scaler,
            "scheduler": self.schedules,
            "reader": self.reader,
        }

    def step(self) -> tuple[float, float]:
        """Loss, and the scale of the next one."""
        noise = torch.rand(32) + float(np.random.rand()) + random.random()
        loss = ((self.model(self.reader.take()) - noise) ** 2).mean()
        self.scaler.scale(loss).backward()
        self.session.step(self.dense, self.scaler)
        for schedule in self.schedules:
            schedule.step()
        return float(loss.detach()), self.scaler.get_scale()


def save_rows(address: str, url: str) -> None:
    """As the command does: nobody waits for a worker."""
    with ControlClient(address) as control:
        name = control.begin_save(url, None, deadline_sec=60).name
        control.enter_save(pb.EnterSaveRequest(url=url, name=name), None, deadline_sec=60)
        while (reply := control.get_save(url, name, wait_sec=5)).phase != pb.SAVED:
            assert reply.phase != pb.FAILED, reply


def test_training_goes_on_from_a_checkpoint_as_if_nothing_had_happened(cluster, tmp_path):
    url = tmp_path / "ckpt"
    with sr.connect(cluster.address, "whole", rank=0, world_size=1) as session:
        training = Training(session)
        for _ in range(7):
            training.step()
        saved = session.save(str(url), **training.parts, extra={"epoch": 3}, config={"who": "test"})
        assert (saved.name, saved.step) == ("save-000001", 6)
        assert saved.is_done()
        losses = [training.step() for _ in range(6)]
        session.save(str(url), **training.parts)
        weights = {name: value.clone() for name, value in training.model.state_dict().items() if "extra" not in name}
    expected = rows_of_checkpoint(url)

    with sr.local_cluster(shards=3, slot_count=64) as other, sr.connect(other.address, "whole") as session:
        again = Training(session, namespace_seed=99)
        again.step()  # whatever it did before is gone
        restored = session.restore(str(url), name="save-000001", **again.parts)
        assert (restored.name, restored.step, restored.extra, restored.config) == (
            "save-000001",
            6,
            {"epoch": 3},
            {"who": "test"},
        )
        assert session.current_step == 7
        assert [again.step() for _ in range(6)] == losses
        for name, value in weights.items():
            assert torch.equal(again.model.state_dict()[name], value), name
        session.save(str(tmp_path / "again"), **again.parts)
    result = rows_of_checkpoint(tmp_path / "again")
    assert result.keys() == expected.keys()
    for table, rows in expected.items():
        assert {k: row[1:] for k, row in result[table].items()} == {k: row[1:] for k, row in rows.items()}
    # What was written after the restore has the versions of a new lineage; all else those that it had.
    before = rows_of_checkpoint(url, "save-000001")["whole/user"]
    for key, row in result["whole/user"].items():
        is_old = before.get(key, (None, 0))[1] == row[1]
        assert row[0] == before[key][0] if is_old else row[0] >> 48 > expected["whole/user"][key][0] >> 48


@pytest.mark.parametrize("left_out", ["model", "optimizer", "scaler", "scheduler", "reader", "random"])
def test_each_item_is_needed(cluster, tmp_path, left_out):
    """Without it training goes on differently, and asked for it is missed."""
    name = f"item-{left_out}"
    with sr.connect(cluster.address, name, rank=0, world_size=1) as session:
        training = Training(session)
        for _ in range(4):
            training.step()
        parts = {what: part for what, part in training.parts.items() if what != left_out}
        session.save(str(tmp_path), **parts)
        wanted = [training.step() for _ in range(5)]
    with sr.connect(cluster.address, name, rank=0, world_size=1) as session:
        again = Training(session, namespace_seed=1)
        for _ in range(2):
            again.step()
        if left_out == "random":
            session.restore(str(tmp_path), **again.parts)
            torch.manual_seed(1)
        else:
            with pytest.raises(NotFound, match="has no state of the " + left_out.rstrip("r")):
                session.restore(str(tmp_path), **again.parts)
            session.restore(str(tmp_path), **{what: part for what, part in again.parts.items() if what != left_out})
        assert [again.step() for _ in range(5)] != wanted


def test_rows_come_back_onto_fewer_shards_and_from_an_ssd(tmp_path):
    keys = np.arange(40_000, dtype=np.uint64)
    values = np.random.default_rng(1).standard_normal((len(keys), 64)).astype(np.float32)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    url = str(tmp_path / "ckpt")
    with (
        sr.local_cluster(shards=2, memory_budget="16MiB", ssd_path=tmp_path / "a") as cluster,
        sr.connect(cluster.address, "big", staleness=None) as session,
    ):
        table = session.create_table("rows", dim=64, optimizer=sr.optim.Adam(lr=0.1))
        for part in np.array_split(np.arange(len(keys)), 20):
            table.assign(keys[part], values[part])
        table.push(keys[:3000], np.ones((3000, 64), np.float32))
        table.delete(keys[-10:])
        session.save(url)
        expected = table.pull(keys)
    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, "big", staleness=None) as session:
        session.restore(url)
        table = session.table("rows")
        np.testing.assert_array_equal(table.pull(keys), expected)
        table.push(keys[:3000], np.ones((3000, 64), np.float32))
        session.save(str(tmp_path / "one"))
    with (
        sr.local_cluster(shards=2, memory_budget="16MiB", ssd_path=tmp_path / "b") as cluster,
        sr.connect(cluster.address, "big", staleness=None) as session,
    ):
        session.restore(str(tmp_path / "one"))
        session.save(str(tmp_path / "two"))
    assert rows_of_checkpoint(tmp_path / "one") == rows_of_checkpoint(tmp_path / "two")


def test_commits_that_arrive_while_it_is_saved_are_not_in_it(cluster, tmp_path):
    """Keys go up by one a push: a cut holds one value for all, whatever goes on."""
    keys = np.arange(5000, dtype=np.uint64)
    with sr.connect(cluster.address, "busy", staleness=None, rank=0, world_size=1) as session:
        table = session.create_table("rows", dim=8, optimizer=sr.optim.SGD(lr=1.0))
        table.assign(keys, np.zeros((len(keys), 8), np.float32))
        is_over = threading.Event()
        pushes = 0

        def push() -> None:
            nonlocal pushes
            while not is_over.is_set():
                table.push(keys, np.full((len(keys), 8), -1, np.float32))
                pushes += 1

        pusher = threading.Thread(target=push)
        pusher.start()
        try:
            for _ in range(3):
                save_rows(cluster.address, str(tmp_path))
        finally:
            is_over.set()
            pusher.join()
    values = []
    for name in files.list_names(Folder(str(tmp_path))):
        rows = rows_of_checkpoint(tmp_path, name)["busy/rows"]
        found = {np.frombuffer(row[2], np.float32).tolist()[0] for row in rows.values()}
        assert len(rows) == len(keys)
        assert len(found) == 1, found
        values.append(found.pop())
    assert values == sorted(values)
    assert 0 <= values[0] <= values[-1] <= pushes


def test_a_save_by_another_is_after_a_whole_step_on_all_shards(cluster, tmp_path):
    """At staleness 0, where a step is committed in two phases: every row of a cut has had as many updates."""

    class AllRows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(ROWS, DIM)

    ids = torch.arange(ROWS)
    with sr.connect(cluster.address, "steps", rank=0, world_size=1) as session:
        model = session.distribute(AllRows(), optimizer=sr.optim.SGD(lr=1.0), min_rows=100)
        saver = threading.Thread(target=lambda: [save_rows(cluster.address, str(tmp_path)) for _ in range(5)])
        saver.start()
        while saver.is_alive():
            model.rows(ids).sum().backward()
            session.step()
        saver.join()
    names = files.list_names(Folder(str(tmp_path)))
    assert len(names) == 5
    for name in names:
        manifest = files.read_manifest(Folder(str(tmp_path)), name)
        step = next(job.step for job in manifest.jobs if job.name == "steps/steps")
        counts = {row[1] for row in rows_of_checkpoint(tmp_path, name)["steps/rows"].values()}
        assert counts <= {step + 1}, (name, step, counts)


def test_two_workers_save_and_three_go_on(cluster, tmp_path):
    def worker(rank: int, world: int, results: list, *, restores: bool) -> None:
        with sr.connect(cluster.address, "team", rank=rank, world_size=world) as session:
            table = session.create_table("rows", dim=DIM, optimizer=sr.optim.SGD(lr=1.0))
            reader = Reader()
            reader.at = 10 + rank
            if restores:
                has_own = rank < 2
                session.restore(str(tmp_path), reader=reader if has_own else None)
            else:
                table.push(np.array([rank], np.uint64), np.ones((1, DIM), np.float32))
                session.save(str(tmp_path), reader=reader, extra={"rank": rank})
            results[rank] = (reader.at, session.current_step, table.pull(np.arange(3, dtype=np.uint64)).tolist())

    for world, restores in ((2, False), (3, True)):
        results: list = [None] * world
        threads = [
            threading.Thread(target=worker, args=(rank, world, results), kwargs={"restores": restores})
            for rank in range(world)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [result[0] for result in results] == [10, 11, 12][:world]
        assert results[0][2] == results[-1][2] == [[-0.5] * DIM, [-0.5] * DIM, [0.0] * DIM]
    manifest = files.read_manifest(Folder(str(tmp_path)))
    assert [worker.rank for worker in manifest.workers] == [0, 1]


def test_saves_of_what_changed_are_small_and_come_back_as_a_whole(cluster, tmp_path):
    url, whole = str(tmp_path / "chain"), str(tmp_path / "whole")
    keys = np.arange(4000, dtype=np.uint64)
    with sr.connect(cluster.address, "chain", staleness=None, rank=0, world_size=1) as session:
        table = session.create_table("rows", dim=16, optimizer=sr.optim.Adagrad(lr=0.1))
        table.push(keys, np.ones((len(keys), 16), np.float32))
        session.create_table("still", dim=4, optimizer=sr.optim.SGD(lr=0.1)).push(
            keys, np.ones((len(keys), 4), np.float32)
        )
        session.save(url, full_every=4)
        for number in range(3):
            table.push(keys[number : number + 5], np.ones((5, 16), np.float32))
            if number == 1:
                table.delete(keys[100:103])
            if number == 2:
                table.push(keys[101:102], np.ones((1, 16), np.float32))  # born again
            session.save(url, full_every=4)
        session.save(whole)
        expected = rows_of_checkpoint(whole)
        saves = [files.read_manifest(Folder(url), name) for name in files.list_names(Folder(url))]
        assert [(save.base, save.chain) for save in saves] == [
            ("", 0),
            ("save-000001", 1),
            ("save-000002", 2),
            ("save-000003", 3),
        ]
        assert saves[1].rows == 5
        assert saves[1].row_bytes < saves[0].row_bytes / 50
        assert 5 < saves[2].rows < saves[0].rows / 3, "slots from which rows were deleted come whole"
    with sr.local_cluster(shards=3, slot_count=64) as other:
        with sr.connect(other.address, "chain", staleness=None) as session:
            session.restore(url)
            session.save(str(tmp_path / "again"))
            table = session.table("rows")
            table.push(keys[:3], np.ones((3, 16), np.float32))
            session.save(str(tmp_path / "again"), full_every=9)
            session.save(url, full_every=9)
        assert rows_of_checkpoint(tmp_path / "again", "save-000001") == expected
    assert files.read_manifest(Folder(str(tmp_path / "again"))).rows == 3
    assert files.read_manifest(Folder(url)).base == "", "another cluster's save has all rows"
    part = next((tmp_path / "chain" / "save-000002").glob("rows.*"))
    part.unlink()
    with (
        sr.connect(cluster.address, "chain", staleness=None, rank=0, world_size=1) as session,
        pytest.raises(DataLoss, match=f"save-000002/{part.name}: the file is missing"),
    ):
        session.restore(url, name="save-000004")


def test_schema_changes(cluster, tmp_path):
    url = str(tmp_path)
    key = np.array([1, 2, 3], np.uint64)
    ones = np.ones((3, DIM), np.float32)
    with sr.connect(cluster.address, "before", staleness=None, rank=0, world_size=1) as session:
        for name in ("kept", "old", "gone"):
            session.create_table(name, dim=DIM, optimizer=sr.optim.Adagrad(lr=0.1)).push(key, ones)
        expected = session.table("kept").pull(key)
        session.save(url)
        session.create_table("late", dim=DIM, optimizer=sr.optim.Adagrad(lr=0.1)).push(key, ones)
        session.restore(url)
        np.testing.assert_array_equal(session.table("late").pull(key), np.zeros((3, DIM)))
        np.testing.assert_array_equal(session.table("gone").pull(key), expected)
        session.restore(url, renames={"old": "fresh"})
        np.testing.assert_array_equal(session.table("fresh").pull(key), expected)
        session.table("fresh").push(key, ones)
        session.table("kept").push(key, ones)
        np.testing.assert_array_equal(session.table("fresh").pull(key), session.table("kept").pull(key))
        # A warm start: one table from another, all else as it is.
        session.table("kept").push(key, ones)
        now = session.table("kept").pull(key)
        session.restore(url, tables=["gone"], renames={"gone": "warm"})
        np.testing.assert_array_equal(session.table("warm").pull(key), expected)
        np.testing.assert_array_equal(session.table("kept").pull(key), now)
        with pytest.raises(NotFound, match=r"table 'before/nosuch' is not in save-000001; there are: before/gone, "):
            session.restore(url, tables=["nosuch"])

        session.core.catalog.drop_table("before", "kept")
        session.create_table("kept", dim=2 * DIM, optimizer=sr.optim.Adagrad(lr=0.1))
        with pytest.raises(FailedPrecondition, match=r"table before/kept has dim 8, the checkpoint has 4"):
            session.restore(url)
        session.core.catalog.drop_table("before", "kept")
        session.create_table("kept", dim=DIM, optimizer=sr.optim.Adam(lr=0.1))
        words = r"has optimizer Adam, the checkpoint has Adagrad; .*where before/kept\.optimizer is in accept"
        with pytest.raises(FailedPrecondition, match=words):
            session.restore(url)
        session.restore(url, accept=["kept.optimizer"])
        np.testing.assert_array_equal(session.table("kept").pull(key), expected)
        # The state begins anew, and so does the bias correction: the first step of Adam is as long as its rate.
        session.table("kept").push(key, np.ones((len(key), DIM), np.float32))
        np.testing.assert_allclose(session.table("kept").pull(key), expected - 0.1, rtol=0, atol=1e-5)


def test_bad_input(cluster, tmp_path):
    url = str(tmp_path / "ckpt")
    with sr.connect(cluster.address, "bad", staleness=None, rank=0, world_size=1) as session:
        table = session.create_table("rows", dim=DIM, optimizer=sr.optim.SGD(lr=1.0))
        key = np.array([5], np.uint64)
        table.push(key, np.ones((1, DIM), np.float32))
        with pytest.raises(NotFound, match="there is no checkpoint"):
            session.restore(url)
        saved = session.save(url)
        table.push(key, np.ones((1, DIM), np.float32))
        with pytest.raises(InvalidArgument, match="nosuch://x"):
            session.save("nosuch://x")
        (tmp_path / "file").write_text("x")
        with pytest.raises(FailedPrecondition, match="file/ckpt"):
            session.save(str(tmp_path / "file" / "ckpt"))
        with pytest.raises(InvalidArgument, match=r"save.keep: 0 is not allowed"):
            session.save(url, keep=0)
        with (
            sr.connect(cluster.address, "bad", job="other", staleness=None, rank=0, world_size=1),
            pytest.raises(FailedPrecondition, match="jobs bad/other are running on namespace bad"),
        ):
            session.restore(url)
        part = next((tmp_path / "ckpt" / saved.name).glob("rows.*"))
        whole = part.read_bytes()
        part.write_bytes(whole[:-2])
        with pytest.raises(DataLoss, match=f"{part.name}: the file has "):
            session.restore(url)
        assert table.pull(key)[0, 0] == -2, "nothing was emptied"
        part.write_bytes(whole[:-1] + b"\x7f")
        with pytest.raises(DataLoss, match=f"{part.name}: is damaged"):
            session.restore(url)
        part.write_bytes(whole)
        session.restore(url)
        assert table.pull(key)[0, 0] == -1
    with (
        sr.local_cluster(shards=1, slot_count=128) as other,
        sr.connect(other.address, "bad") as session,
        pytest.raises(FailedPrecondition, match=r"with 64 slots, this one has 128; start it with --slot-count=64"),
    ):
        session.restore(url)


@pytest.mark.parametrize("saved_as", ["plain", "compiled", "before the mend"])
def test_compiled_and_plain_models_load_the_states_of_each_other(cluster, tmp_path, monkeypatch, saved_as):
    url = str(tmp_path / "ckpt")
    if saved_as == "before the mend":
        saving = sys.modules["sparserow.worker.checkpoint.save"]
        monkeypatch.setattr(saving, "state_of", lambda model: dict(model.state_dict()))
    with sr.connect(cluster.address, f"compiled-{saved_as[:4]}", rank=0, world_size=1) as session:
        model = session.distribute(Model(), optimizer=sr.optim.SGD(lr=1.0), min_rows=100)
        compiled = torch.compile(model, backend="eager")
        kept = {key: value.clone() for key, value in model.state_dict().items()}
        rows = session.table("user").pull(np.arange(ROWS))
        session.save(url, model=model if saved_as == "plain" else compiled)
        for other in (model, compiled):
            session.table("user").assign(np.arange(ROWS), np.zeros((ROWS, DIM), np.float32))
            with torch.no_grad():
                model.top[0].weight.zero_()
            session.restore(url, model=other)
            assert all(torch.equal(value, kept[key]) for key, value in model.state_dict().items())
            np.testing.assert_array_equal(session.table("user").pull(np.arange(ROWS)), rows)
        model.top = torch.compile(model.top, backend="eager")
        session.restore(url, model=model)
        monkeypatch.undo()
        assert "top.0.weight" in plain_names(session, model, str(tmp_path / "of_parts"))


def plain_names(session, model, url):
    """The names of the dense state of a checkpoint that is made of the model."""
    folder = Folder(url) / session.save(url, model=model).name
    tree = decode_tree(folder.read("worker.0.safetensors"), url, tensor_of)
    return list(tree["model"])


def test_another_model_is_refused_before_any_row_changes(cluster, tmp_path):
    url = str(tmp_path / "ckpt")
    with sr.connect(cluster.address, "other-model", rank=0, world_size=1) as session:
        model = session.distribute(Model(), optimizer=sr.optim.SGD(lr=1.0), min_rows=100)
        session.save(url, model=model)
        session.table("user").assign([3], np.full((1, DIM), 7, np.float32))
        model.top = nn.Sequential(nn.Linear(DIM, 9), nn.ReLU(), nn.Linear(9, 1))
        text = (
            r"it lacks top.2.weight, top.2.bias; this model lacks top.3.weight, top.3.bias; the shapes differ: "
            r"top.0.weight is \(8, 4\) there and \(9, 4\) here, .*; nothing was changed"
        )
        with pytest.raises(FailedPrecondition, match=text):
            session.restore(url, model=model)
        np.testing.assert_array_equal(session.table("user").pull([3]), np.full((1, DIM), 7))


@pytest.mark.parametrize("mistake", ["groups", "kind", "schedulers", "no scaler"])
def test_states_that_do_not_fit_are_refused_before_any_row_changes(cluster, tmp_path, mistake):
    url = str(tmp_path / "ckpt")
    with sr.connect(cluster.address, f"unfit-{mistake.replace(' ', '-')}", rank=0, world_size=1) as session:
        model = session.distribute(Model(), optimizer=sr.optim.SGD(lr=1.0), min_rows=100)
        dense = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(dense, 5)
        session.save(url, model=model, optimizer=dense, scheduler=scheduler)
        session.table("user").assign([3], np.full((1, DIM), 7, np.float32))
        parameters = list(model.parameters())
        wrong, text = {
            "groups": (
                {"optimizer": torch.optim.Adam([{"params": parameters[:1]}, {"params": parameters[1:]}])},
                r"another optimizer: its parameter groups have \[\d\] parameters there and \[1, \d\] here",
            ),
            "kind": (
                {"optimizer": torch.optim.SGD(parameters, lr=0.1)},
                "the state of another kind of optimizer, with the option 'amsgrad', which SGD lacks",
            ),
            "schedulers": ({"scheduler": [scheduler, scheduler]}, "the state of 1 schedulers, but 2 are given"),
            "no scaler": ({"scaler": torch.amp.GradScaler("cpu")}, "no state of the scaler of rank 0"),
        }[mistake]
        with pytest.raises((FailedPrecondition, NotFound), match=f"{text}.*; nothing was changed"):
            session.restore(url, model=model, **wrong)
        np.testing.assert_array_equal(session.table("user").pull([3]), np.full((1, DIM), 7))
        session.restore(url, model=model, optimizer=dense, scheduler=scheduler)
        assert not np.array_equal(session.table("user").pull([3]), np.full((1, DIM), 7))


def test_a_session_without_a_cluster_or_within_a_step_is_refused(cluster, tmp_path):
    with sr.InProcessCluster().connect() as session, pytest.raises(FailedPrecondition, match="needs a cluster"):
        session.save(str(tmp_path))
    with sr.connect(cluster.address, "within", rank=0, world_size=1) as session:
        training = Training(session)
        training.model(training.reader.take()).sum().backward()
        with pytest.raises(FailedPrecondition, match="within a step"):
            session.save(str(tmp_path))
        session.discard()
        assert session.save(str(tmp_path)).step == -1


def test_nothing_is_begun_for_a_reader_without_a_place(cluster, tmp_path):
    with sr.connect(cluster.address, "reader") as session:
        session.create_table("rows", dim=2, optimizer=sr.optim.SGD())
        with pytest.raises(sr.errors.InvalidArgument, match=r"save\.reader: DataLoader"):
            session.save(str(tmp_path / "ckpt"), reader=DataLoader([1, 2]))
    assert not (tmp_path / "ckpt").exists()


def test_keep_removes_older_ones(cluster, tmp_path):
    with sr.connect(cluster.address, "keep", staleness=None, rank=0, world_size=1) as session:
        for _ in range(4):
            session.save(str(tmp_path), keep=2)
    assert files.list_names(Folder(str(tmp_path))) == ["save-000003", "save-000004"]


def test_a_rank_that_comes_late_to_a_failed_save_gets_its_end_at_once(cluster, tmp_path):
    """Rank 0 fails, before and after it has begun, and only then do the others call: no rank waits for one that does
    not come, and the save after it has all of them."""
    url, begun = str(tmp_path / "late"), threading.Barrier(2, timeout=120)
    found: dict[int, str] = {}

    def worker(rank: int) -> None:
        with sr.connect(cluster.address, "late", rank=rank, world_size=2, staleness=None) as session:
            if rank == 0:
                session.create_table("t", dim=2, optimizer=sr.optim.SGD(lr=1.0))
            begun.wait()
            with pytest.raises(sr.errors.InvalidArgument):
                session.save(url, keep=0)  # on both: nothing has begun
            begun.wait()
            if rank == 0:
                with pytest.raises(sr.errors.SparserowError, match="extra"):
                    session.save(url, extra={"a": object()})  # it has begun, and cannot be written
            begun.wait()
            if rank == 1:
                with pytest.raises(
                    sr.errors.Unavailable, match="another worker could not write its part of the checkpoint"
                ):
                    session.save(url)
            begun.wait()
            found[rank] = session.save(url).name

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(worker, rank) for rank in range(2)]:
            done.result(timeout=300)
    assert found[0] == found[1]
    assert list(files.list_names(Folder(url))) == [found[0]]


def damaged_of(cluster) -> list[str]:
    with ControlClient(cluster.address) as control:
        return list(control.status().damaged_checkpoints)


def test_a_shard_that_cannot_come_back_notes_the_damage(tmp_path):
    folder = Folder(str(tmp_path))
    with sr.local_cluster(shards=1, slot_count=64) as cluster:
        with sr.connect(cluster.address, "rows", staleness=None) as session:
            table = session.create_table("t", dim=DIM, optimizer=sr.optim.SGD(lr=1.0))
            table.push(np.arange(500, dtype=np.uint64), np.ones((500, DIM), np.float32))
            session.save(str(tmp_path), wait=True)
        (part, *_) = files.read_manifest(folder).tables[0].parts
        path = tmp_path / "save-000001" / part.file
        data = path.read_bytes()
        path.write_bytes(data[:-100] + bytes([data[-100] ^ 1]) + data[-99:])
        with ControlClient(cluster.address) as control:
            os.kill(control.status().shards[0].pid, signal.SIGKILL)
        wait_until(lambda: files.damaged_in(folder) == {"save-000001"}, "the note of the damage")


@pytest.mark.parametrize("found_by", ["verify", "restore"])
def test_the_save_after_damage_was_found_holds_all_rows(cluster, tmp_path, found_by):
    url, keys = str(tmp_path / "damage"), np.arange(1, 2001, dtype=np.uint64)
    folder = Folder(url)
    with sr.connect(cluster.address, f"damaged-{found_by}", staleness=None) as session:
        table = session.create_table("t", dim=DIM, optimizer=sr.optim.SGD(lr=1.0))

        def save_some(count: int) -> files.Manifest:
            table.push(keys[:count], np.ones((count, DIM), np.float32))
            return files.read_manifest(folder, session.save(url, full_every=10).name)

        assert save_some(2000).base == ""
        assert save_some(10).base == "save-000001"
        (facts, *_) = files.read_manifest(folder, "save-000001").slots
        path = tmp_path / "damage" / "save-000001" / facts.file
        data = path.read_bytes()
        path.write_bytes(data[:-500] + bytes([data[-500] ^ 1]) + data[-499:])
        find = {
            "verify": lambda: files.verify(folder, files.read_chain(folder)),
            "restore": lambda: session.restore(url),
        }
        with pytest.raises(DataLoss, match="save-000001"):
            find[found_by]()
        assert files.damaged_in(folder) == {"save-000001"}
        if found_by == "verify":
            wait_until(lambda: damaged_of(cluster) == ["save-000001"], "the status to name it")
        assert save_some(10).base == "", "it needs nothing of what is damaged"
        assert save_some(10).base == "save-000003"
        files.verify(folder, files.read_chain(folder))


def test_a_restore_of_dense_tensors_on_the_servers_is_no_change_of_this_process(cluster, tmp_path):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(20, DIM)
            self.head = nn.Linear(DIM, 1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.rows(ids)).sum()

    with sr.connect(cluster.address, "dense-restore", staleness=None) as session:
        model = session.distribute(Net(), optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
        session.dense_on_servers(model, optimizer=sr.optim.SGD(lr=0.1))
        ids = torch.arange(5)
        model(ids).backward()
        session.step()
        session.save(str(tmp_path), model=model)
        model.eval()
        expected = model(ids).detach()
        model.train()
        for _ in range(3):
            model(ids).backward()
            session.step()
        session.restore(str(tmp_path), model=model)
        model.eval()
        torch.testing.assert_close(model(ids).detach(), expected)
        model.train()
        model(ids).backward()
        assert session.step()
