"""Attacks on the room of others: a token of one namespace makes tables, jobs, registrations, rows and clients without
end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

import sparserow as sr
from sparserow.deploy.launch.security_files import add_token, init_security
from sparserow.proto import control_pb2 as control_pb, rows_pb2 as pb, rows_pb2_grpc as pb_grpc
from sparserow.proto.control import ControlClient
from sparserow.proto.errors import Fenced, ResourceExhausted
from sparserow.proto.optim import SGD
from sparserow.proto.schema import TableSchema
from sparserow.proto.security.channels import SecureChannel
from sparserow.proto.security.security import Security
from sparserow_process import Launcher, wait_until

TABLES, JOBS, PER_SEC = 6, 3, 2
BUDGET = 64 << 20
DIM = 16
BATCH = 20_000
QUOTAS = f"quotas:\n  default: {{tables: {TABLES}, jobs: {JOBS}, registrations_per_sec: {PER_SEC}}}\n"
RAISED = f"  namespaces:\n    ads: {{tables: {TABLES + 1}}}\n"


class Scene:
    """A cluster of one shard with a budget, and a token for each of three namespaces."""

    def __init__(self, folder: Path) -> None:
        self.path = init_security(folder, ["127.0.0.1"], valid_sec=3600)
        self.plain = self.path.read_text() + QUOTAS
        self.path.write_text(self.plain)
        self.tokens: dict[str, Security] = {}
        for name in ("ads", "news", "shop", "all"):
            only = () if name == "all" else (name,)
            add_token(folder / "tokens.yaml", name, "train", only, output=folder / f"{name}.token")
            (folder / f"{name}.yaml").write_text(f"ca: ca.pem\ntoken_file: {name}.token\n")
            self.tokens[name] = Security.load(folder / f"{name}.yaml")
        self.url = str(folder / "checkpoints")
        self.address = ""

    def connect(self, namespace: str, job: str) -> sr.Session:
        return sr.connect(
            self.address, namespace, job=job, staleness=None, security=self.tokens[namespace], deadline_sec=30.0
        )

    def control(self, token: str) -> ControlClient:
        return ControlClient(self.address, security=self.tokens[token])

    def drop_all(self, namespace: str) -> None:
        with self.control("all") as control:
            names = [table.name for table in control.list_tables(namespace)]
            for name in names:
                control.drop_table(namespace, name)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    scene = Scene(tmp_path_factory.mktemp("quotas"))
    sr.use_security(scene.path)
    try:
        with sr.local_cluster(shards=1, memory_budget=BUDGET, checkpoint_roots=[scene.url]) as cluster:
            sr.use_security(None)
            scene.address = cluster.address
            yield scene
    finally:
        sr.use_security(None)


@pytest.fixture(autouse=True)
def _rested(scene: Scene) -> Iterator[None]:
    yield
    for namespace in ("ads", "news", "shop"):
        scene.drop_all(namespace)


def fill(make: Callable[[int], object], most: int = 1000) -> tuple[int, str]:
    """Calls ``make`` with 0, 1, ... until it is refused; returns how often it was not, and the refusal."""
    for number in range(most):
        try:
            make(number)
        except ResourceExhausted as refused:
            return number, str(refused)
    raise AssertionError(f"{most} were not refused")


def test_tables_without_end_are_refused_and_others_make_theirs(scene: Scene) -> None:
    with scene.control("ads") as ads:
        made, refusal = fill(lambda number: ads.create_table(TableSchema("ads", f"t{number}", 4, SGD())))
        assert made == TABLES
        assert f"namespace 'ads': {TABLES + 1} tables are not allowed; allowed: at most {TABLES}" in refusal
        assert "quotas.namespaces.ads.tables in the security file" in refusal
        with scene.connect("news", "job") as session:
            session.create_table("t", dim=4, optimizer=sr.optim.SGD())
        ads.drop_table("ads", "t0")
        ads.create_table(TableSchema("ads", "again", 4, SGD()))
        scene.path.write_text(scene.plain + RAISED)  # the servers read it again
        try:
            wait_until(lambda: _is_made(ads, "more"), "a raised bound")
        finally:
            scene.path.write_text(scene.plain)
        wait_until(lambda: not _is_made(ads, f"other-{time.monotonic()}"), "the bound as it was")
        with scene.control("all") as control:
            assert len(control.list_tables("ads")) >= TABLES + 1  # those that are there stay


def _is_made(control: ControlClient, name: str) -> bool:
    try:
        control.create_table(TableSchema("ads", name, 4, SGD()))
    except ResourceExhausted:
        return False
    return True


def test_jobs_without_end_are_refused_and_those_that_run_go_on(scene: Scene) -> None:
    sessions: list[sr.Session] = []
    try:
        made, refusal = fill(lambda number: sessions.append(scene.connect("ads", f"job-{number}")))
        assert made == JOBS
        assert f"{JOBS + 1} jobs with workers are not allowed; allowed: at most {JOBS}" in refusal
        with scene.connect("news", "job"):
            table = sessions[0].create_table("t", dim=4, optimizer=sr.optim.SGD(lr=1.0), init=sr.Constant(0.0))
            table.push(np.arange(4, dtype=np.uint64), np.ones((4, 4), np.float32))
        sessions.pop().close()
        sessions.append(scene.connect("ads", "another"))
    finally:
        for session in sessions:
            session.close()


def test_registrations_without_end_are_refused_while_others_register(scene: Scene) -> None:
    refusals: list[str] = []
    is_over = threading.Event()

    def attack() -> None:
        with scene.control("shop") as control:
            while not is_over.is_set():
                try:
                    control.register_worker(
                        namespace="shop", job="storm", rank=0, world_size=1, staleness=None, deadline_sec=2.0
                    )
                except Fenced:  # another thread has registered the rank
                    pass
                except ResourceExhausted as refused:
                    refusals.append(str(refused))

    threads = [threading.Thread(target=attack) for _ in range(24)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(refusals) > 50, "registrations that are refused")
        with scene.connect("news", "meanwhile") as session:
            table = session.create_table("t", dim=4, optimizer=sr.optim.SGD(lr=1.0), init=sr.Constant(0.0))
            table.push(np.arange(4, dtype=np.uint64), np.ones((4, 4), np.float32))
            assert (table.pull(np.arange(4, dtype=np.uint64)) == -1.0).all()
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert f"more than {PER_SEC} registrations of workers a second are not allowed" in refusals[0]


def test_rows_without_end_are_refused_before_those_of_others(scene: Scene) -> None:
    def push(table: sr.Table, number: int) -> None:
        keys = np.arange(number * BATCH, (number + 1) * BATCH, dtype=np.uint64)
        table.push(keys, np.ones((BATCH, DIM), np.float32))

    with scene.connect("ads", "job-rows") as ads, scene.connect("news", "job-rows") as news:
        greedy, modest = (
            session.create_table("rows", dim=DIM, optimizer=sr.optim.SGD(lr=1.0), init=sr.Constant(0.0))
            for session in (ads, news)
        )
        pushed, refusal = fill(lambda number: push(greedy, number))
        assert "namespace ads has" in refusal
        assert "kept for other namespaces" in refusal
        assert pushed * BATCH * DIM * 4 > BUDGET / 2
        push(modest, 0)
        push(greedy, 0)  # rows that exist need no memory
        assert (modest.pull(np.arange(BATCH, dtype=np.uint64)) == -1.0).all()


def test_a_restore_makes_no_more_tables_than_a_namespace_may_have(scene: Scene) -> None:
    with scene.control("all") as control:
        wait_until(lambda: not control.status().jobs, "the ends of other tests' jobs")
        for number in range(TABLES):
            control.create_table(TableSchema("ads", f"t{number}", 4, SGD()))
        with sr.connect(scene.address, "ads", job="saver", staleness=None, security=scene.tokens["all"]) as session:
            session.save(scene.url)
        renames = [control_pb.TableRename(saved=f"ads/t{number}", name=f"shop/t{number}") for number in range(TABLES)]
        control.create_table(TableSchema("shop", "own", 4, SGD()))
        request = control_pb.RestoreRequest(url=scene.url, renames=renames, tables=[each.saved for each in renames])
        with pytest.raises(ResourceExhausted, match=rf"namespace 'shop': {TABLES + 1} tables are not allowed"):
            control.restore(request, None, deadline_sec=60.0)
        assert [table.name for table in control.list_tables("shop")] == ["own"]
        control.drop_table("shop", "own")
        control.restore(request, None, deadline_sec=60.0)
        assert len(control.list_tables("shop")) == TABLES


def test_pushes_without_keys_are_no_clients_of_a_gateway(scene: Scene, tmp_path: Path) -> None:
    with scene.connect("ads", "job-gateway") as session:
        session.create_table("t", dim=4, optimizer=sr.optim.SGD(lr=1.0))
    launcher = Launcher(tmp_path)
    launcher.environment["SPARSEROW_SECURITY"] = str(scene.path)
    try:
        gateway = launcher.start("gateway", f"--coordinator={scene.address}", "--port=0")
        where = gateway.wait_for(r"gateway ready at gRPC (\S+)")[1].rstrip(",")
        with SecureChannel(where, scene.tokens["ads"]) as channel:
            stub = pb_grpc.RowsStub(channel)
            for number in range(50):
                empty = pb.PushRowsRequest(namespace="ads", table="t", client=f"c{number}", sequence=1)
                with pytest.raises(grpc.RpcError) as refused:
                    stub.Push(empty, timeout=30)
                assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
                assert "keys: allowed: 1 or more" in str(refused.value.details())
            one = pb.PushRowsRequest(namespace="ads", table="t", client="c0", sequence=1, keys=[1], grads=bytes(16))
            assert not stub.Push(one, timeout=60).was_applied_before
    finally:
        launcher.kill_all()
