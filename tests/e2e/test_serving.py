"""A model is trained, published, served, followed and queried, with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import sparserow as sr
from sparserow.deploy import cli
from sparserow.deploy.observe.serving_view import describe_serving
from sparserow.proto import serving_pb2, serving_pb2_grpc
from sparserow_process import Launcher, Process, free_port, wait_until

DIM = 4
KEYS = np.arange(1, 401, dtype=np.uint64)


@pytest.fixture(scope="module")
def trained() -> Iterator[tuple[sr.LocalCluster, sr.Session, np.ndarray]]:
    """A cluster with a table of rows, its session, and the rows."""
    with sr.local_cluster(shards=2) as cluster, sr.connect(cluster.address, "ads", staleness=None) as session:
        table = session.create_table("user", dim=DIM, optimizer=sr.optim.SGD(lr=0.5), init=sr.Uniform(-1, 1), seed=3)
        rows = np.random.default_rng(1).standard_normal((len(KEYS), DIM)).astype(np.float32)
        table.assign(KEYS, rows)
        yield cluster, session, rows


class Running:
    """A serving process, once it is ready."""

    def __init__(self, launcher: Launcher, *arguments: str) -> None:
        self.process: Process = launcher.start("serve", "--port=0", "--poll=50ms", *arguments)
        ready = self.process.wait_for(r"ready at gRPC (\S+), data plane (\S+?)(?:, (/\S+?))?(?:, HTTP (\S+))?\n")
        self.address, self.http = ready[1], ready[4]


def check_no_torch(serving: Running) -> None:
    """Rows are served without torch, also after the lookups of every front."""
    loaded = Path(f"/proc/{serving.process.popen.pid}/maps").read_text()
    assert "libsparserow_core" in loaded
    assert "torch" not in loaded


def expected(session: sr.Session, keys: np.ndarray) -> np.ndarray:
    return session.table("user").pull(keys)


@pytest.mark.started
def test_publish_serve_look_up_and_swap(
    trained: tuple[sr.LocalCluster, sr.Session, np.ndarray], tmp_path: Path, launcher: Launcher
) -> None:
    _, session, rows = trained
    root = str(tmp_path / "models")
    first = session.publish("ctr", root=root, card={"auc": 0.8})
    assert (first.version, first.rows) == (1, len(KEYS))
    common = (f"--root={root}", "--model=ctr", "--grace=1s")
    shards = [
        Running(launcher, *common, "--shard=0/2", "--http-port=0"),
        Running(launcher, *common, "--shard=1/2"),
    ]
    addresses = [shard.address for shard in shards]
    unknown = np.array([10**6, 10**7], np.uint64)
    with (
        sr.ServingClient(addresses, refresh_sec=0.1, transport="tcp") as client,
        sr.ServingClient(addresses) as local,
    ):
        for each in (client, local):
            got, found = each.lookup("user", KEYS)
            np.testing.assert_array_equal(got, rows)
            assert found.all()
        many = np.arange(20_000, dtype=np.uint64)
        for mine, other in zip(local.lookup("user", many), client.lookup("user", many), strict=True):
            np.testing.assert_array_equal(mine, other)
        for each in shards:  # has mapped memory of the client that may use it
            assert Path(f"/proc/{each.process.popen.pid}/maps").read_text().count("sparserow-lane") == 2
        missed = client.lookup("user", unknown)
        assert not missed.found.any()
        assert missed.answered.all()
        assert (missed.version, missed.versions.tolist()) == (1, [0, 0])
        np.testing.assert_array_equal(missed.rows, expected(session, unknown))  # the initial row, as in training
        check_bad_lookups(client, addresses)
        check_fronts(shards, rows)
        asyncio.run(check_async(addresses, rows))
        for shard in shards:
            check_no_torch(shard)

        session.table("user").assign(KEYS, rows + 1)
        failures: list[str] = []
        stop = threading.Event()

        def keep_looking_up() -> None:
            while not stop.is_set():
                answer = client.lookup("user", KEYS, deadline_ms=20_000)
                value = float(np.abs(answer.rows - rows - (answer.version - 1)).max())
                if answer.is_partial or value > 1e-5:  # every row of the version that answered
                    failures.append(f"version {answer.version}: off by {value}, {answer.errors}")

        looking = threading.Thread(target=keep_looking_up)
        looking.start()
        second = session.publish("ctr", root=root)
        wait_until(lambda: client.version == second.version == 2, "the swap")
        rolled_back = launcher.start("rollback", "ctr", f"--root={root}")
        assert rolled_back.end() == 0
        assert rolled_back.out == "ctr@live is version 1\n"
        wait_until(lambda: client.version == 1, "the rollback")
        stop.set()
        looking.join()
        assert failures == []

        shards[1].process.signal(signal.SIGKILL)
        shards[1].process.end()
        partial = client.lookup("user", KEYS, deadline_ms=20_000)
        assert partial.is_partial
        assert 0 < partial.answered.sum() < len(KEYS)
        np.testing.assert_array_equal(partial.rows[partial.answered], rows[partial.answered])
        assert not partial.rows[~partial.answered].any()
        assert isinstance(partial.errors[0], sr.errors.Unavailable | sr.errors.DeadlineExceeded)


def check_bad_lookups(client: sr.ServingClient, addresses: list[str]) -> None:
    with pytest.raises(sr.errors.NotFound, match="table 'item' is not in model 'ctr'; its tables: user"):
        client.lookup("item", [1])
    with pytest.raises(sr.errors.InvalidArgument, match="keys: dtype float64"):
        client.lookup("user", np.zeros(3))
    with pytest.raises(sr.errors.InvalidArgument, match="keys: -1 is not allowed"):
        client.lookup("user", [-1])
    with pytest.raises(sr.errors.InvalidArgument, match="deadline_ms: 0 is not allowed"):
        client.lookup("user", [1], deadline_ms=0)
    with pytest.raises(sr.errors.NotFound, match="model ctr@test is not served"):
        sr.ServingClient(addresses, model="ctr@test")
    with pytest.raises(sr.errors.Unavailable, match="serving shard 1 of 2: none of the given addresses"):
        sr.ServingClient(addresses[0])
    assert client.lookup("user", []).rows.shape == (0, DIM)


def check_fronts(shards: list[Running], rows: np.ndarray) -> None:
    """gRPC and HTTP give the rows of the process's own shard, and say which those are."""
    answered = np.zeros(len(KEYS), bool)
    for shard in shards:
        with grpc.insecure_channel(shard.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            assert health.Check(health_pb2.HealthCheckRequest(), timeout=30).status == 1
            stub = serving_pb2_grpc.ServingStub(channel)
            tables = [serving_pb2.TableKeys(table="user", packed_keys=KEYS.tobytes())]
            reply = stub.Lookup(serving_pb2.LookupRequest(model="ctr", tables=tables), timeout=30)
            table = reply.tables[0]
            mine = np.frombuffer(table.answered, np.bool_)
            got = np.frombuffer(table.rows, np.float32).reshape(len(KEYS), DIM)
            np.testing.assert_array_equal(got[mine], rows[mine])
            assert not (answered & mine).any()
            answered |= mine
            for request, words in (
                (serving_pb2.LookupRequest(model="nope"), "model nope@live: it is not served here; served: ctr@live"),
                (serving_pb2.LookupRequest(model="a b"), "model: 'a b' is not allowed"),
                (serving_pb2.LookupRequest(model="ctr", tables=[*tables, *tables]), "is named twice"),
            ):
                with pytest.raises(grpc.RpcError) as raised:
                    stub.Lookup(request, timeout=30)
                assert words in raised.value.details()
    assert answered.all()
    body = {"model": "ctr", "tables": {"user": [1, 2, 3]}}
    found = ask(shards[0].http, "/v1/lookup", body)["tables"]["user"]
    for i, (row, is_answered) in enumerate(zip(found["rows"], found["answered"], strict=True)):
        assert row == (pytest.approx(rows[i].tolist()) if is_answered else [0.0] * DIM)
    assert ask(shards[0].http, "/v1/health")["ready"]
    assert ask(shards[0].http, "/v1/models")["aliases"][0]["version"] == 1
    for wrong, status, words in (
        ({"model": "ctr", "tables": {"user": ["x"]}}, 400, "keys must be a list of integers"),
        ({"model": "ctr", "tables": {"item": [1]}}, 404, "table 'item' is not in ctr; its tables: user"),
        ({"model": "ctr", "tables": {}, "deadline": 3}, 400, "deadline: unknown key"),
        ([1], 400, "the body must be"),
    ):
        with pytest.raises(urllib.error.HTTPError) as raised:
            ask(shards[0].http, "/v1/lookup", wrong)
        assert raised.value.code == status
        assert words in json.loads(raised.value.read())["error"]


def ask(address: str, path: str, body: object = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(f"http://{address}{path}", data=data, timeout=60) as reply:
        return json.loads(reply.read())


async def check_async(addresses: list[str], rows: np.ndarray) -> None:
    async with await sr.AsyncServingClient.connect(addresses) as client:
        answers = await asyncio.gather(*(client.lookup("user", KEYS[i : i + 50]) for i in range(0, 400, 50)))
    np.testing.assert_array_equal(np.concatenate([answer.rows for answer in answers]), rows)
    with pytest.raises(sr.errors.FailedPrecondition, match="AsyncServingClient: the client is closed"):
        await client.lookup("user", KEYS)
    with sr.ServingClient(addresses) as closed:
        pass
    with pytest.raises(sr.errors.FailedPrecondition, match="ServingClient: the client is closed"):
        closed.lookup("user", KEYS)


@pytest.mark.started
def test_serving_follows_training_and_restarts(
    trained: tuple[sr.LocalCluster, sr.Session, np.ndarray], tmp_path: Path, launcher: Launcher
) -> None:
    cluster, session, rows = trained
    table = session.table("user")
    table.assign(KEYS, rows)
    root = str(tmp_path / "models")
    session.publish("ctr", root=root, dtype="bfloat16")
    arguments = (f"--root={root}", "--model=ctr", f"--follow={cluster.address}", "--sync-interval=20ms")
    serving = Running(launcher, *arguments)
    born, gone = np.arange(1000, 1100, dtype=np.uint64), KEYS[:50]

    def equals(client: sr.ServingClient) -> bool:
        keys = np.concatenate([KEYS, born])
        answer = client.lookup("user", keys)
        alive = ~np.isin(keys, gone)
        wanted = expected(session, keys)
        close = np.abs(answer.rows - wanted) <= np.abs(wanted) / 128
        return bool(close.all()) and bool((answer.found == alive).all())

    table.push(KEYS, np.ones((len(KEYS), DIM), np.float32))
    table.push(born, np.ones((len(born), DIM), np.float32))
    table.delete(gone)
    with sr.ServingClient(serving.address) as client:
        wait_until(lambda: equals(client), "the changes")
    serving.process.signal(signal.SIGKILL)
    serving.process.end()
    table.push(KEYS[100:], np.ones((300, DIM), np.float32))
    metrics_port = free_port()
    again = Running(launcher, *arguments, f"--metrics-port={metrics_port}")
    with sr.ServingClient(again.address) as client:
        wait_until(lambda: equals(client), "the changes after a restart")
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=60) as reply:
        page = reply.read().decode()
    assert "sparserow_serving_ready 1.0" in page
    assert float(re.search(r'synced_rows_total\{model="ctr",version="1"\} (\S+)', page)[1]) > 0
    assert f'sparserow_serving_held_rows{{model="ctr",version="1"}} {len(KEYS) + len(born) - len(gone)}' in page
    assert 'sparserow_serving_freshness_seconds_bucket{le="+Inf",model="ctr",version="1"}' in page
    straight = Running(launcher, "--model=now", f"--follow={cluster.address}", "--namespace=ads")
    with sr.ServingClient(straight.address) as client:
        wait_until(lambda: equals(client), "the rows straight from training")
        assert client.version == 0


def test_what_cannot_be_served_or_published_is_said(
    trained: tuple[sr.LocalCluster, sr.Session, np.ndarray], tmp_path: Path, launcher: Launcher
) -> None:
    _, session, _ = trained
    root = str(tmp_path / "models")
    line = launcher.start("serve", "--port=0", f"--root={root}", "--model=ctr").error_line()
    assert f"NotFound: model 'ctr': there is none at {root}; there are: none" in line
    session.publish("ctr", root=root)
    for arguments, words in (
        (("--model=ctr@test",), "has no alias 'test'; it has: live"),
        (("--model=ctr", "--shard=2/2"), "--shard 2/2 --replica 0 is not allowed"),
        (("--model=ctr", "--namespace=ads"), "--namespace has no effect with --root"),
        (("--model=ctr", "--host=0.0.0.0"), "is reachable from other machines"),
    ):
        assert words in launcher.start("serve", "--port=0", f"--root={root}", *arguments).error_line()
    assert "--root: is missing" in launcher.start("serve", "--port=0", "--model=ctr").error_line()
    with pytest.raises(sr.errors.InvalidArgument, match="dtype: 'int4' is not allowed"):
        session.publish("ctr", root=root, dtype="int4")
    with pytest.raises(sr.errors.InvalidArgument, match=r"dtype\['item'\] matches no table; tables: user"):
        session.publish("ctr", root=root, dtype={"item": "int8"})
    with pytest.raises(sr.errors.InvalidArgument, match="model and example belong together"):
        session.publish("ctr", root=root, example=(1,))
    with pytest.raises(sr.errors.FailedPrecondition, match="needs a session of a cluster"):
        sr.InProcessCluster().connect("ads").publish("ctr", root=root)


def test_a_damaged_version_is_refused_and_the_old_one_stays(
    trained: tuple[sr.LocalCluster, sr.Session, np.ndarray], tmp_path: Path, launcher: Launcher
) -> None:
    _, session, rows = trained
    session.table("user").assign(KEYS, rows)
    root = tmp_path / "models"
    session.publish("ctr", root=str(root))
    serving = Running(launcher, f"--root={root}", "--model=ctr", "--http-port=0")
    session.publish("ctr", root=str(root), alias=None)
    part = next((root / "ctr" / "v000002").glob("rows.*"))
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    assert launcher.start("alias", "ctr", "2", f"--root={root}").end() == 0
    wait_until(lambda: "does not match its checksum" in str(ask(serving.http, "/v1/health")["problems"]), "the refusal")
    with sr.ServingClient(serving.address) as client:
        answer = client.lookup("user", KEYS)
        assert answer.version == 1
        np.testing.assert_array_equal(answer.rows, rows)
    (served, problem) = describe_serving([serving.address])
    assert (served.model, served.version, served.problem) == ("ctr", 1, "")
    assert problem.problem.startswith("ctr@live: ")
    assert "does not match its checksum" in problem.problem
    port = free_port()
    launcher.start("serve", f"--port={port}", f"--root={root}", "--model=ctr@2")

    def is_said() -> bool:
        return any("ctr@2: " in each.problem for each in describe_serving([f"127.0.0.1:{port}"]))

    wait_until(is_said, "the reason why the process is not ready")


@pytest.mark.started
def test_publish_while_a_shard_is_down(tmp_path: Path) -> None:
    with (
        contextlib.suppress(sr.errors.Unavailable),  # of the cluster, at the end of the block
        sr.local_cluster(shards=2) as cluster,
        sr.connect(cluster.address, "ads", staleness=None) as session,
    ):
        session.create_table("user", dim=DIM, optimizer=sr.optim.SGD()).assign(KEYS, np.ones((400, DIM), np.float32))
        os.kill(cluster.shard_pids[1], signal.SIGKILL)
        with pytest.raises(sr.errors.Unavailable, match=r"shard \d|coordinator"):
            session.publish("ctr", root=str(tmp_path))
        assert not list(tmp_path.rglob("manifest.json"))


def test_the_probe_writes_looks_up_and_deletes(
    trained: tuple[sr.LocalCluster, sr.Session, np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, session, _ = trained
    before = sum(len(keys) for keys, _ in session.table("user").scan())
    with sr.local_serving("now", follow=cluster.address, namespace="ads") as serving:
        named = (f"--serving={serving.addresses[0]}", f"--coordinator={cluster.address}")
        for table, code, words in (
            ("ads/user", 0, "5 writes to ads/user were served after "),
            ("ads/item", 1, "table 'item': is not in model 'now'; it has: user"),
            ("user", 1, "table: 'user' is not allowed; allowed: NAMESPACE/NAME"),
        ):
            with pytest.raises(SystemExit) as ended:
                cli.main(["probe", table, *named, "--count=5"])
            assert ended.value.code == code
            out, err = capsys.readouterr()
            assert words in out + err
    assert sum(len(keys) for keys, _ in session.table("user").scan()) == before
