"""Inference with a published program: raw ids in, rows from the serving processes, results as in training."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from prometheus_client import CollectorRegistry
from torch import Tensor, nn

import sparserow as sr
from sparserow.deploy import cli
from sparserow.deploy.examples.online_service import make_app
from sparserow.proto import serving_pb2, serving_pb2_grpc
from sparserow.proto.published.dense import newest_number, read_dense, write_dense
from sparserow.proto.published.registry import ModelRegistry
from sparserow.serving.inference.inference import ServedModel
from sparserow_process import Launcher, wait_until


class Scorer(nn.Module):
    """A table of ids, a table of bags, a dense tower."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(1000, 4)
        self.tags = nn.EmbeddingBag(500, 4, mode="mean")
        self.tower = nn.Sequential(nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, user: Tensor, tags: Tensor, age: Tensor) -> Tensor:
        found: Tensor = self.tower(torch.cat([self.user(user), self.tags(tags), age.unsqueeze(1)], dim=1))
        return found.squeeze(1)


def batch(seed: int, rows: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, 1000, (rows,), generator=made),
        torch.randint(0, 500, (rows, 3), generator=made),
        torch.rand(rows, generator=made),
    )


class Trained:
    """A model trained for a few steps in a cluster, published, and served."""

    def __init__(self, cluster: sr.LocalCluster, session: sr.Session, root: str) -> None:
        self.cluster, self.session, self.root = cluster, session, root
        torch.manual_seed(0)
        self.model = session.distribute(Scorer(), optimizer=sr.optim.Adagrad(lr=0.1), min_rows=1)
        self.dense = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.train(5)
        self.publish()

    def train(self, steps: int) -> None:
        for step in range(steps):
            self.model(*batch(step)).square().mean().backward()
            self.session.step(self.dense)

    def publish(self) -> sr.Published:
        return self.session.publish("ctr", root=self.root, model=self.model, example=batch(0))

    def score(self, arguments: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        self.model.eval()
        with torch.no_grad():
            scored: Tensor = self.model(*arguments)
        self.model.train()
        return scored


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    with sr.local_cluster(shards=2) as cluster, sr.connect(cluster.address, "ads") as session:
        yield Trained(cluster, session, str(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def scores(trained: Trained) -> list[list[float]]:
    """By version, of batch(9) cut to 6 rows; the second is trained further. The names are given free afterwards."""
    first = trained.score(batch(9, 6))
    trained.train(5)
    trained.publish()
    second = trained.score(batch(9, 6))
    assert (first - second).abs().max() > 1e-3
    trained.session.close()
    return [first.tolist(), second.tolist()]


_POSITIONAL = """
import sys

import sparserow as sr
import torch

with sr.ServingClient(sys.argv[1:2], model="ctr@1") as client, sr.ServedModel(client, sys.argv[2]) as served:
    scores = served(torch.tensor([1, 2]), torch.tensor([[3, 4, 5], [6, 7, 8]]), torch.tensor([0.5, 0.25]))
    assert scores.shape == (2,)
    assert "pyarrow" not in sys.modules, "tensors need no columns"
    try:
        served({"user": [1]})
    except sr.errors.FailedPrecondition as error:
        assert "was published without features" in str(error)
    else:
        raise AssertionError("columns are refused")
"""


def test_a_version_that_takes_tensors_does_not_import_pyarrow(trained: Trained, scores: list[list[float]]) -> None:
    assert scores
    with sr.local_serving("ctr@1", root=trained.root) as serving:
        done = subprocess.run(
            [sys.executable, "-c", _POSITIONAL, serving.addresses[0], trained.root], capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr


def test_a_call_under_way_keeps_its_version_while_another_is_taken_over(
    trained: Trained, scores: list[list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    began, goes_on, run_program = threading.Event(), threading.Event(), ServedModel._run

    def held(self: ServedModel, loaded: Any, arguments: tuple[Any, ...]) -> Any:
        if loaded.version == 1:
            began.set()
            assert goes_on.wait(60)
        return run_program(self, loaded, arguments)

    monkeypatch.setattr(ServedModel, "_run", held)
    registry = ModelRegistry(trained.root)
    registry.point("ctr", "held", 1)
    with (
        sr.local_serving("ctr@held", root=trained.root, poll="50ms") as serving,
        sr.ServingClient(serving.addresses, model="ctr@held", refresh_sec=0.1) as client,
        ServedModel(client, trained.root) as served,
        ThreadPoolExecutor(2) as threads,
    ):
        under_way = threads.submit(served.predict, *batch(9, 6))
        assert began.wait(60)
        registry.point("ctr", "held", 2)
        wait_until(lambda: client.version == 2, "the move")
        taken_over = threads.submit(served.refresh)
        wait([taken_over], 1.0)  # it waits for the call; without that it is over now, and the call reads other rows
        goes_on.set()
        assert under_way.result(60).version == 1
        np.testing.assert_allclose(under_way.result().output.tolist(), scores[0], rtol=1e-5, atol=1e-6)
        assert taken_over.result(60) == 2
        np.testing.assert_allclose(served(*batch(9, 6)).tolist(), scores[1], rtol=1e-5, atol=1e-6)


def test_a_program_scores_as_in_training_and_changes_with_its_alias(
    trained: Trained, scores: list[list[float]]
) -> None:
    with (
        sr.local_serving("ctr", root=trained.root, poll="50ms") as serving,
        sr.ServingClient(serving.addresses, refresh_sec=0.1) as client,
        ServedModel(client, trained.root) as served,
    ):
        assert served.version == 2
        np.testing.assert_allclose(served(*batch(9, 6)).tolist(), scores[1], rtol=1e-5, atol=1e-6)
        assert [given.name for given in served.inputs] == ["user", "tags", "age"]
        assert served.inputs[1].shape == (None, 3)
        with pytest.raises(sr.errors.FailedPrecondition, match="is already bound in this process"):
            ServedModel(client, trained.root)
        ModelRegistry(trained.root).rollback("ctr", "live")
        wait_until(lambda: client.version == 1, "the rollback")
        assert served.refresh() == 1
        np.testing.assert_allclose(served(*batch(9, 6)).tolist(), scores[0], rtol=1e-5, atol=1e-6)
        with TestClient(make_app(served)) as web:
            arguments = [part.tolist() for part in batch(9, 6)]
            reply = web.post("/predict", json={"arguments": arguments}).json()
            assert (reply["version"], reply["dense_version"]) == (1, 0)
            np.testing.assert_allclose(reply["output"], scores[0], rtol=1e-5, atol=1e-6)
            assert web.get("/model").json()["inputs"][0]["name"] == "user"
            assert web.post("/predict", content=b" " * (5 << 20)).status_code == 413
            for wrong, words in (
                ([], "must be a list of 3 arrays: user, tags, age"),
                ([arguments[0], arguments[1], "x"], "age:"),
                ([arguments[1], arguments[1], arguments[2]], "user: 2 dimensions are not allowed; allowed: 1"),
            ):
                refused = web.post("/predict", json={"arguments": wrong})
                assert refused.status_code == 400
                assert words in refused.json()["detail"]


def test_a_program_follows_its_alias_by_itself(trained: Trained, scores: list[list[float]], launcher: Launcher) -> None:
    assert len(scores) == 2, "both versions are there"
    registry = ModelRegistry(trained.root)
    registry.point("ctr", "live", 2)
    process = launcher.start("serve", f"--root={trained.root}", "--model=ctr", "--port=0", "--poll=50ms", "--grace=3s")
    address = process.wait_for(r"gRPC (\S+:\d+)")[1].rstrip(",")
    with (
        sr.ServingClient(address, model="ctr", refresh_sec=0.1) as client,
        ServedModel(client, trained.root, refresh_sec=0.1) as served,
    ):
        for version in (1, 2):
            registry.point("ctr", "live", version)
            wait_until(lambda version=version: served.version == version, "the version")  # type: ignore[misc]
            began = time.monotonic()
            while time.monotonic() < began + 4.0:  # until the version before is given up
                np.testing.assert_allclose(served(*batch(9, 6)).tolist(), scores[version - 1], rtol=1e-5, atol=1e-6)
    assert "sparserow-served-model" not in {thread.name for thread in threading.enumerate()}


def test_a_program_that_is_not_refreshed_in_time_is_told_so(
    trained: Trained, scores: list[list[float]], launcher: Launcher
) -> None:
    assert len(scores) == 2, "both versions are there"
    registry = ModelRegistry(trained.root)
    registry.point("ctr", "live", 2)
    process = launcher.start(
        "serve", f"--root={trained.root}", "--model=ctr", "--port=0", "--poll=50ms", "--grace=500ms"
    )
    address = process.wait_for(r"gRPC (\S+:\d+)")[1].rstrip(",")
    with (
        sr.ServingClient(address, model="ctr", refresh_sec=0.1) as client,
        ServedModel(client, trained.root, refresh_sec=None) as served,
    ):
        before = served(*batch(9, 6))
        registry.point("ctr", "live", 1)
        wait_until(lambda: client.version == 1, "the swap")

        def is_given_up() -> bool:
            try:
                return not torch.equal(served(*batch(9, 6)), before)
            except sr.errors.NotFound:
                return True

        wait_until(is_given_up, "the end of the old version")
        with pytest.raises(sr.errors.NotFound):
            served(*batch(9, 6))
        assert served.refresh() == 1
        np.testing.assert_allclose(served(*batch(9, 6)).tolist(), scores[0], rtol=1e-5, atol=1e-6)


def test_a_program_looks_up_all_tables_at_once_and_may_keep_rows(trained: Trained, scores: list[list[float]]) -> None:
    with (
        sr.local_serving("ctr@1", root=trained.root) as serving,
        sr.ServingClient(serving.addresses, model="ctr@1") as client,
    ):
        with pytest.raises(sr.errors.InvalidArgument, match=r"cache\.capacity_bytes: 10 is not allowed; allowed: >= "):
            ServedModel(client, trained.root, cache=sr.LookupCache(10))
        with ServedModel(client, trained.root, cache=sr.LookupCache(1 << 20, ttl_ms=600_000)) as served:
            for _ in range(3):
                np.testing.assert_allclose(served(*batch(9, 6)).tolist(), scores[0], rtol=1e-5, atol=1e-6)
            assert served.stats().pulls == 3  # of the session; two tables each
            asked = len({int(user) for user in batch(9, 6)[0]}) + len({int(tag) for tag in batch(9, 6)[1].flatten()})
            stats = served.stats()
            assert (stats.cache_hits, stats.cache_misses) == (2 * asked, asked)
            assert 0 < stats.cache_hit_age_seconds < 600 * stats.cache_hits
            registry = CollectorRegistry()
            registry.register(sr.ServedModelMetrics(served))
            for name, value in (("version", 1), ("cache_hits_total", 2 * asked)):
                assert registry.get_sample_value(f"sparserow_inference_{name}", {"model": served.name}) == value


def test_dense_weights_follow_training_and_replies_name_both_versions(tmp_path: Path) -> None:
    root = str(tmp_path / "models")
    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, "dense") as session:
        trained = Trained(cluster, session, root)
        dense = sr.DensePublisher(session, "ctr", root=root, model=trained.model, every_sec=3600)
        assert dense.step() is None  # an hour has not passed
        hourly = sr.DensePublisher(session, "ctr", root=root, model=trained.model, every_sec=1e-9)
        expected = []
        for _ in range(3):
            trained.train(2)
            published = hourly.step()
            assert published is not None
            expected.append(trained.score(batch(9, 6)).tolist())
        assert (published.number, published.step) == (3, session.current_step)
        compiled: nn.Module = torch.compile(trained.model, backend="eager")  # type: ignore[assignment]
        assert sr.DensePublisher(session, "ctr", root=root, model=compiled).version == 1
        with pytest.raises(
            sr.errors.InvalidArgument, match=r"weight 'tower.0.weight' of version 1 is torch.float32 of shape"
        ):
            sr.DensePublisher(session, "ctr", root=root, model=nn.Linear(2, 2))
        with pytest.raises(sr.errors.InvalidArgument, match="every_sec: 0 is not allowed"):
            sr.DensePublisher(session, "ctr", root=root, model=trained.model, every_sec=0)
        with pytest.raises(sr.errors.NotFound, match="has no version 7"):
            sr.DensePublisher(session, "ctr", root=root, model=trained.model, version=7)
        with sr.local_serving("ctr", root=root, follow=cluster.address, poll="50ms") as serving:
            session.close()  # its tables' names are free
            with (
                sr.ServingClient(serving.addresses, refresh_sec=0.1) as client,
                ServedModel(client, root) as served,
                grpc.insecure_channel(serving.addresses[0]) as channel,
            ):

                def is_fresh() -> bool:
                    return bool(np.allclose(served(*batch(9, 6)).tolist(), expected[-1], rtol=1e-5, atol=1e-6))

                wait_until(is_fresh, "the rows")  # dense weights and rows are both those of the last step
                told = served.predict(*batch(9, 6))
                assert (told.version, told.dense_version, told.dense_step) == (1, 3, published.step)
                stub = serving_pb2_grpc.ServingStub(channel)
                reply = stub.Lookup(serving_pb2.LookupRequest(model="ctr"), timeout=60)
                assert (reply.version, reply.dense_version) == (1, 3)
                write_dense_again(root)
                assert served.refresh() == 1
                assert served.dense_version == 4
                assert served.predict(*batch(9, 6)).dense_step == published.step + 7
                wait_until(
                    lambda: stub.Lookup(serving_pb2.LookupRequest(model="ctr"), timeout=60).dense_version == 4, "4"
                )
                damage_dense(root, 5)
                with pytest.raises(sr.errors.DataLoss, match="does not match its checksum"):
                    served.refresh()
                assert served.dense_version == 4  # what is in use stays


def test_the_documented_way_loads_a_program_in_a_fresh_process(trained: Trained) -> None:
    page = (Path(sr.__file__).parent / "docs" / "serving.md").read_text()
    block = page.split("```python\nimport io\n")[1].split("```")[0]
    lines = [line for line in block.splitlines() if "aoti" not in line and "batch" not in line]  # a minute of compilers
    script = "\n".join(["import io", f"root, version = {trained.root!r}, 1", *lines, "print(len(program.graph.nodes))"])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5


def write_dense_again(root: str) -> None:
    """The newest dense weights once more, of seven steps later."""
    folder = ModelRegistry(root).folder("ctr", 1)
    facts, data = read_dense(folder, newest_number(folder))
    write_dense(folder, [bytes(data)], facts.step + 7)


def damage_dense(root: str, number: int) -> None:
    write_dense_again(root)
    path = Path(root) / "ctr" / "v000001" / "dense" / f"{number:06d}" / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str, str]:
    """Exit code, output and errors of a command, run in this process."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_predict_query_and_row(
    trained: Trained, scores: list[list[float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    user, tags, age = batch(9, 6)
    lines = ["user,tags[0],tags[1],tags[2],age"]
    lines += [",".join(map(str, (int(u), *t.tolist(), float(a)))) for u, t, a in zip(user, tags, age, strict=True)]
    rows = tmp_path / "rows.csv"
    rows.write_text("\n".join(lines) + "\n")
    key, coordinator = str(int(user[0])), f"--coordinator={trained.cluster.address}"
    with sr.local_serving("ctr@2", root=trained.root) as serving:
        named = f"--serving={','.join(serving.addresses)}"
        predict = ("predict", f"--root={trained.root}", named, "--model=ctr@2", f"--input={rows}")
        code, out, _ = run(capsys, *predict, "--batch-rows=4")
        assert code == 0
        np.testing.assert_allclose([float(line) for line in out.split()], scores[1], rtol=1e-5, atol=1e-6)
        for text, words in (
            ("user,tags[0],tags[1],age\n1,2,3,4\n", "there is no column 'tags[2]', which the program needs"),
            ("user,tags[0],tags[1],tags[2],age,x\n", "column 'x' is no argument of the program"),
            ("user,tags[0],tags[1],tags[2],age\n1,2,3,4,5\n1,2,b,4,5\n", "rows.csv:3: column 'tags[1]': 'b' is no int"),
        ):
            rows.write_text(text)
            assert words in run(capsys, *predict)[2]
        code, out, _ = run(capsys, "query", "user", key, "123456789", named, "--model=ctr@2")
        assert code == 0
        assert out.splitlines()[1].startswith("123456789: ")
        assert "(default row)" in out.splitlines()[1]
        assert out.splitlines()[2] == "model ctr version 2"
        assert "key 'x' is no integer" in run(capsys, "query", "user", "x", named)[2]
        code, out, _ = run(capsys, "row", "ads/user", key, "--explain", named, coordinator, "--model=ctr@2")
        assert code == 0
        for part in (
            "training: ", "serving:  ", "slot: ", "training shard: ", "lineage 1", "model: ctr version 2",
            "tier: memory", "updates: ", "age in training: ",
        ):  # fmt: skip
            assert part in out
        assert "serving is: the same version" in out
        code, out, _ = run(capsys, "row", "ads/user", "123456789", "--explain", coordinator)
        assert "tier: none: the row does not exist" in out
    wrong = run(capsys, "row", "ads/nope", "1", coordinator)[2]
    assert "table 'ads/nope': there is no such table; namespace 'ads' has: tags, user" in wrong


def test_a_version_without_a_program_is_said(
    trained: Trained, scores: list[list[float]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(scores) == 2
    publish = ("publish", "rows", f"--root={trained.root}", "--namespace=ads")
    code, out, _ = run(capsys, *publish, f"--coordinator={trained.cluster.address}")
    assert code == 0
    assert "published rows@1: " in out
    with (
        sr.local_serving("rows", root=trained.root) as serving,
        sr.ServingClient(serving.addresses) as client,
        pytest.raises(
            sr.errors.NotFound,
            match=r"rows@1: the version was published without a program.*sparserow query.*section publish.*example=",
        ),
    ):
        ServedModel(client, trained.root)
