"""Lines of texts, and items to draw from, are read once for all workers, and again only of files that have changed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import sparserow as sr
from sparserow.proto.config.job import JobConfig
from sparserow.proto.names import DATA_TABLE
from sparserow.proto.options.document import load_config
from sparserow.worker.data.sources import item_table, lines
from sparserow.worker.data.sources.known_files import KnownFiles
from sparserow.worker.session.namespace_file import NamespaceFile
from sparserow.worker.training import files_read
from sparserow.worker.training.job_readers import open_readers
from sparserow.worker.training.process_group import WorkerGroup
from sparserow.worker.training.ps_backend import PsBackend
from sparserow.worker.training.trainer import Trainer
from sparserow.worker.training.training_report import Silence

ROWS = 600


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files whose lines were counted, and "items" for each pass over the files for their items."""
    told: list[str] = []
    plan_runs = lines.plan_runs

    def planned(path: str, begin: Any) -> Any:
        told.append(Path(path).name)
        return plan_runs(path, begin)

    def counted(*args: Any, **options: Any) -> Any:
        told.append("items")
        return item_table(*args, **options)

    monkeypatch.setattr(lines, "plan_runs", planned)
    monkeypatch.setattr("sparserow.worker.training.files_read.item_table", counted)
    return told


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a class of its own and two training files of yesterday."""
    (tmp_path / "read_once_model.py").write_text(
        "import torch\n"
        "from torch import nn\n\n\n"
        "class TwoTower(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.user, self.item = nn.Embedding(100, 4), nn.Embedding(100, 4)\n"
        "        self.scale = nn.Parameter(torch.ones(1))\n\n"
        "    def forward(self, user, item):\n"
        "        values, offsets = item\n"
        "        count = int((offsets[1:] - offsets[:-1]).max())\n"
        "        rows = self.item(values).view(-1, count, 4)\n"
        "        return (rows @ self.user(user)[:, :, None]).squeeze(2) * self.scale\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("a.csv", "b.csv"):
        written(tmp_path / name)
    return tmp_path


def written(path: Path, rows: int = ROWS, age_sec: float = 3600.0) -> None:
    path.write_text("y,user,item\n" + "".join(f"{i % 2},{i % 37},{i * i % 53}\n" for i in range(rows)))
    os.utime(path, (time.time() - age_sec,) * 2)


def job_of(folder: Path, *more: str) -> JobConfig:
    sets = [
        f"data.train={folder}/[ab].csv",
        f"data.test={folder}/b.csv",
        "data.format=csv",
        "data.csv={columns: [y, user, item], label: y, header: true}",
        "features={user: {kind: id, modulo: 100}, item: {kind: id, modulo: 100}}",
        "model={class: 'read_once_model:TwoTower', min_rows: 1}",
        "tasks={y: {loss: softmax, item: item, negatives: {kind: popularity, per_positive: 2}}}",
        "name=ads",
        "train={batch_size: 60, threads: 1, epochs: 1}",
    ]
    return load_config(JobConfig, None, [*sets, *more])


def trained(job: JobConfig, address: str, resume: str = "never", group: WorkerGroup | None = None) -> Trainer:
    group = group or WorkerGroup()
    place = {"rank": group.rank, "world_size": group.world}
    with sr.connect(address, job.name, staleness=job.train.staleness, gather_sec=60, **place) as session:
        backend = PsBackend(job, session, address)
        trainer = Trainer(job, group=group, backend=backend, observer=Silence(), resume=resume)
        trainer.run()
    return trainer


@pytest.fixture
def address() -> Iterator[str]:
    with sr.local_cluster(shards=2) as cluster:
        yield cluster.address


def opened_together(job: JobConfig, address: str, workers: int = 2) -> None:
    """Opens the readers of workers that have no process group, at the same time; all of them have the same samples."""
    together = threading.Barrier(workers)

    def opened(rank: int) -> int:
        place: dict[str, Any] = {"rank": rank, "world_size": workers, "gather_sec": 60.0}
        with sr.connect(address, job.name, staleness=None, **place) as session:
            digest = open_readers(job, WorkerGroup(rank, workers, meets=False), session).train.digest(60)
            together.wait(60)
            return digest

    with ThreadPoolExecutor(workers) as threads:
        assert len(set(threads.map(opened, range(workers)))) == 1


APART = "train.dense=ps", "train.staleness=null"


def test_a_later_start_reads_what_has_changed_alone(data: Path, read: list[str], address: str) -> None:
    job = job_of(data)
    trained(job, address)
    assert sorted(read) == ["a.csv", "b.csv", "items"], "b.csv is a training and a test file"
    read.clear()
    first = trained(job, address)
    assert read == []
    written(data / "b.csv", ROWS + 60, age_sec=1800.0)
    trained(job, address)
    assert sorted(read) == ["b.csv", "items"], "items are those of all files"
    read.clear()
    written(data / "c.csv")
    more = job_of(data, f"data.train={data}/[abc].csv")
    trained(more, address)
    assert sorted(read) == ["c.csv", "items"]
    read.clear()
    again = trained(more, address)
    assert read == []
    plan = again._train_reader.files
    assert [Path(file.path).name for file in plan] == ["a.csv", "b.csv", "c.csv"]
    assert [int(file.rows.sum()) for file in plan] == [ROWS, ROWS + 60, ROWS]
    assert first._train_reader.options.candidates is not None


def test_a_file_named_twice_is_trained_on_twice(data: Path, read: list[str], address: str) -> None:
    job = job_of(data, f"data.train=[{data}/a.csv, {data}/a.csv]")
    for _ in range(2):
        assert sum(int(file.rows.sum()) for file in trained(job, address)._train_reader.files) == 2 * ROWS


@pytest.mark.parametrize(
    ("first", "change"),
    [
        pytest.param(None, "features.item.modulo=50", id="modulo"),
        pytest.param(None, "tasks.y.negatives.kind=uniform", id="kind"),
        pytest.param(None, "data.on_bad_line=skip", id="bad lines"),
        pytest.param("data.on_bad_line=skip", "features.user.modulo=50", id="another feature, which may refuse a row"),
    ],
)
def test_items_of_another_making_are_counted_again(
    data: Path, read: list[str], address: str, first: str | None, change: str
) -> None:
    given = [] if first is None else [first]
    trained(job_of(data, *given), address)
    read.clear()
    job = job_of(data, "name=other", *given, change)
    with sr.connect(address, "ads") as ads, sr.connect(address, "other") as other:
        kept = NamespaceFile(ads.core, DATA_TABLE).read()
        assert kept is not None
        NamespaceFile(other.core, DATA_TABLE).write(kept)
    trained(job, address)
    assert read == ["items"]


def test_lines_of_another_layout_are_counted_again(data: Path, read: list[str], address: str) -> None:
    trained(job_of(data), address)
    read.clear()
    trained(
        job_of(data, "data.csv={columns: [y, user, item], label: y, header: false}", "data.on_bad_line=skip"), address
    )
    assert sorted(read) == ["a.csv", "b.csv", "items"]


def test_a_file_that_was_just_written_is_counted_again(data: Path, read: list[str], address: str) -> None:
    written(data / "a.csv", age_sec=0.0)
    trained(job_of(data), address)
    read.clear()
    trained(job_of(data), address)
    assert sorted(read) == ["a.csv", "items"], "a later write may have the same time"


def test_a_run_goes_on_without_a_read_on_a_cluster_without_rows(data: Path, read: list[str], tmp_path: Path) -> None:
    job = job_of(data, f"train.checkpoint={{url: {tmp_path}/saves, every_steps: 5}}")
    with sr.local_cluster(shards=2) as cluster:
        with sr.connect(cluster.address, "neighbour") as session:
            session.create_table("t", dim=2, optimizer=sr.optim.SGD(lr=1.0)).assign([1, 2], [[1, 2], [3, 4]])
        trained(job, cluster.address)
    read.clear()
    with sr.local_cluster(shards=1) as cluster:
        assert trained(job, cluster.address, "auto").is_resumed
        assert read == []
        with sr.connect(cluster.address, "neighbour") as session:  # the cluster had no rows when it was restored
            assert session.table("t").pull([1, 2]).tolist() == [[1, 2], [3, 4]]
        assert trained(job, cluster.address, "auto").is_resumed
        assert read == []


def test_workers_that_do_not_meet_read_each_file_once(data: Path, read: list[str], address: str) -> None:
    opened_together(job_of(data, *APART), address)
    assert sorted(read) == ["a.csv", "b.csv", "items"]
    read.clear()
    opened_together(job_of(data, *APART), address)
    assert read == []


def test_workers_on_hosts_with_copies_take_the_plan_of_the_first(
    data: Path, read: list[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times of copies differ, and a file that was just written has none: the run's own plan counts all the same."""
    monkeypatch.setattr("sparserow.worker.data.sources.known_files.identity_of", lambda _: str(time.monotonic_ns()))
    monkeypatch.setattr("sparserow.worker.training.files_read.identity_of", lambda _: str(time.monotonic_ns()))
    opened_together(job_of(data, *APART), address)
    assert sorted(read) == ["a.csv", "b.csv", "items"]


def test_what_is_too_large_to_keep_is_read_by_each(
    data: Path, read: list[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparserow.worker.training.files_read.MOST_BYTES", 1100)
    opened_together(job_of(data, *APART), address)
    assert sorted(read) == ["a.csv", "b.csv", "items", "items"], "the items are left out first"
    read.clear()
    monkeypatch.setattr("sparserow.worker.training.files_read.MOST_BYTES", 1)
    opened_together(job_of(data, "name=small", *APART), address)
    assert sorted(read) == sorted(["a.csv", "b.csv", "items"] * 2)


def test_a_damaged_document_is_written_anew(
    data: Path, read: list[str], address: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of(data)
    trained(job, address)
    with sr.connect(address, "ads") as session:
        file = NamespaceFile(session.core, DATA_TABLE)
        kept = file.read()
        assert kept is not None
        for spoilt in (kept[:-1], b"x" * 10, kept.replace(b'"1"', b'"9"', 1), kept[:-1] + bytes([kept[-1] ^ 1])):
            file.write(spoilt)
            trained_beside = file.read()
            assert trained_beside == spoilt
    read.clear()
    trained(job, address)
    assert sorted(read) == ["a.csv", "b.csv", "items"]
    assert "lines and items of the data files are read again: table ads/data.safetensors" in caplog.text
    read.clear()
    trained(job, address)
    assert read == []


def test_a_plan_of_a_changed_file_never_trains_on_half_a_line(
    data: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same size and time with other lines: the plan is taken, and the first read of the part notices it."""
    trained(job_of(data), address)
    before = (data / "a.csv").stat()
    text = (data / "a.csv").read_text()
    (data / "a.csv").write_text(text[:-6] + "\n" + text[-5:])
    os.utime(data / "a.csv", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (data / "a.csv").stat().st_size == before.st_size
    with pytest.raises(sr.errors.DataLoss, match="the file has changed since the job began"):
        trained(job_of(data), address)


@contextmanager
def opened_apart(job: JobConfig, address: str) -> Iterator[list[Future[int]]]:
    """Two workers without a process group open the job's files; each future is a digest of its training data."""

    def opened(rank: int) -> int:
        with sr.connect(address, "ads", staleness=None, rank=rank, world_size=2, gather_sec=60) as session:
            return open_readers(job, WorkerGroup(rank, 2, meets=False), session).train.digest(60)

    with ThreadPoolExecutor(2) as threads:
        yield [threads.submit(opened, rank) for rank in range(2)]


def test_the_next_worker_reads_where_the_first_one_could_not(
    data: Path, read: list[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, has_failed = files_read.item_table, threading.Event()

    def failing(*args: Any, **options: Any) -> Any:
        if not has_failed.is_set():
            has_failed.set()
            raise sr.errors.DataLoss("b.csv: damaged")
        return counted(*args, **options)

    monkeypatch.setattr(files_read, "item_table", failing)
    with opened_apart(job_of(data, *APART), address) as (first, second):
        with pytest.raises(sr.errors.DataLoss, match=r"b\.csv: damaged"):
            first.result(60)
        assert second.result(60)
    assert sorted(read) == ["a.csv", "a.csv", "b.csv", "b.csv", "items"], "what the first one left unfinished as well"


@pytest.mark.parametrize("becomes", ["dropped", "another job's"])
def test_a_document_that_is_gone_is_waited_for_no_longer_than_the_first_steps(
    data: Path, read: list[str], address: str, becomes: str
) -> None:
    """Rank 0 writes it once: a worker that comes later, as after a shard's restore, reads the files itself."""
    job, is_open = job_of(data, *APART), threading.Barrier(2)

    def opened(rank: int) -> int:
        with sr.connect(address, "ads", staleness=None, rank=rank, world_size=2, gather_sec=60) as session:
            if rank == 1:
                is_open.wait(60)
            digest = open_readers(job, WorkerGroup(rank, 2, meets=False), session).train.digest(60)
            if rank == 0:
                file = NamespaceFile(session.core, DATA_TABLE)
                session.drop_table(DATA_TABLE)
                if becomes != "dropped":
                    file.write(KnownFiles("another").written())
                session.step(allow_empty=True)
                is_open.wait(60)
                is_done.wait(60)
            else:
                is_done.set()
            return digest

    is_done = threading.Event()
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(opened, range(2), timeout=60)
    assert first == second
    assert sorted(read) == ["a.csv", "a.csv", "b.csv", "b.csv", "items", "items"]


def test_what_the_first_worker_cannot_write_ends_it_and_holds_nobody_up(
    data: Path, read: list[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a namespace that may have no more tables; where workers meet it is a warning."""
    write, has_failed = NamespaceFile.write, threading.Event()

    def refused(file: NamespaceFile, contents: bytes) -> None:
        if has_failed.is_set():
            write(file, contents)
            return
        has_failed.set()
        raise sr.errors.ResourceExhausted("no more tables")

    monkeypatch.setattr(NamespaceFile, "write", refused)
    with opened_apart(job_of(data, *APART), address) as (first, second):
        with pytest.raises(sr.errors.ResourceExhausted, match="no more tables"):
            first.result(60)
        assert second.result(60)
    has_failed.clear()
    trained(job_of(data, "name=alone"), address)
    assert has_failed.is_set()
