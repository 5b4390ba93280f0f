"""Features in training and in serving: the same keys from the same columns, through a published version."""

from __future__ import annotations

import datetime
import json
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from torch import Tensor, nn

import sparserow as sr
from sparserow.deploy.cli import main
from sparserow.proto.features.compute import Jagged
from sparserow.proto.features.value_keys import keys_of_values
from sparserow.proto.published.registry import ModelRegistry
from sparserow_process import Launcher, free_port

MODULO = 2**40
SAMPLES = 10_000


def columns_of(rows: int, seed: int) -> dict[str, list[Any]]:
    draw = np.random.default_rng(seed)
    tags = [[f"t{each}" for each in draw.integers(0, 50, draw.integers(0, 4))] for _ in range(rows)]
    begin = datetime.datetime(2026, 1, 1)
    return {
        "user_id": [f"u{each}" if each % 17 else None for each in draw.integers(0, 500, rows)],
        "age": [float(each) if each % 9 else None for each in draw.integers(0, 90, rows)],
        "tags": tags,
        "weight": [[float(len(each)) for each in some] for some in tags],
        "history": [draw.integers(0, 1000, draw.integers(0, 8)).tolist() for _ in range(rows)],
        "moment": [begin + datetime.timedelta(minutes=int(each)) for each in draw.integers(0, 10**6, rows)],
        "city": [f"c{each}" for each in draw.integers(0, 5, rows)],
        "unused": [0] * rows,
    }


class Net(nn.Module):
    def __init__(self, features: sr.features.Features) -> None:
        super().__init__()
        with sr.deferred():
            self.users, self.crosses = nn.Embedding(MODULO, 8), nn.Embedding(MODULO, 8)
            self.tag_bags = nn.EmbeddingBag(MODULO, 8, mode="sum", include_last_offset=True)
            self.histories = nn.EmbeddingBag(MODULO, 8, mode="mean", include_last_offset=True)
        self.hours = nn.Embedding(features.keys_of("hour") or 0, 4)
        self.cities = nn.Embedding(features.keys_of("city") or 0, 4)
        self.ages = nn.Embedding(features.keys_of("age_bucket") or 0, 4)
        self.top = nn.Linear(4 * 8 + 3 * 4 + 1, 1)

    def forward(
        self,
        user: Tensor,
        age: Tensor,
        age_bucket: Tensor,
        where: Tensor,
        tags: tuple[Tensor, Tensor, Tensor],
        history: tuple[Tensor, Tensor],
        hour: Tensor,
        city: Tensor,
    ) -> Tensor:
        rows = [self.users(user), self.crosses(where), self.hours(hour), self.cities(city), self.ages(age_bucket)]
        rows += [self.tag_bags(tags[0], tags[1], per_sample_weights=tags[2]), self.histories(*history)]
        return self.top(torch.cat([*rows, age.unsqueeze(1)], dim=1)).squeeze(1)


@dataclass
class World:
    root: str
    features: sr.features.Features
    test: dict[str, list[Any]]
    scores: Tensor


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A model with features that was trained and published, and its scores."""
    folder = tmp_path_factory.mktemp("featured")
    (folder / "cities.txt").write_text("c0\nc1\nc2\n")
    train, test = columns_of(2_000, 1), columns_of(SAMPLES, 2)
    features = sr.features.Features(
        [
            sr.features.IdFeature("user", column="user_id", modulo=MODULO),
            sr.features.NumericFeature("age", log1p=True, scale="standardize"),
            sr.features.BucketizedFeature("age_bucket", column="age", quantiles=8),
            sr.features.CrossFeature("where", of=("user_id", "city"), modulo=MODULO),
            sr.features.MultiHotFeature("tags", weights="weight", modulo=MODULO),
            sr.features.SequenceFeature("history", max_len=5, modulo=MODULO),
            sr.features.TimeFeature("hour", column="moment", zone="Europe/Berlin"),
            sr.features.IdFeature("city", vocabulary=str(folder / "cities.txt")),
        ]
    ).fit([train])
    with sr.local_cluster(shards=2) as cluster, sr.connect(cluster.address, "ads") as session:
        torch.manual_seed(0)
        model = session.distribute(Net(features), optimizer=sr.optim.Adagrad(lr=0.1), min_rows=1000)
        dense = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = []
        for begin in [*range(0, 2_000, 500)] * 3:
            columns = {name: values[begin : begin + 500] for name, values in train.items()}
            labels = torch.tensor([float((age or 0) > 40) for age in columns["age"]])
            loss = nn.functional.binary_cross_entropy_with_logits(model(**features(columns)), labels)
            loss.backward()
            session.step(dense)
            losses.append(float(loss.detach()))
        assert losses[-1] < 0.85 * losses[0], "the model learns"
        example = {name: values[:50] for name, values in train.items()}
        root = str(folder / "models")
        session.publish("ctr", root=root, model=model, features=features, example=example)
        tensors = tuple(features(example).values())
        compiled = torch.compile(model, backend="eager")
        assert session.publish("compiled", root=root, model=compiled, features=features, example=example).rows
        with pytest.raises(sr.errors.InvalidArgument, match="features: has no effect without model"):
            session.publish("ctr", root=root, features=features)
        one = {name: values[:1] for name, values in train.items()}
        with pytest.raises(sr.errors.InvalidArgument, match=r"example: feature 'user' has 1 rows; at least 2"):
            session.publish("ctr", root=root, model=model, features=features, example=one)
        fewer = sr.features.Features(features.set.features[:2])
        with pytest.raises(sr.errors.FailedPrecondition, match="age need statistics"):
            fewer(example)
        assert ModelRegistry(root).versions("ctr") == [1]
        model.eval()
        with torch.no_grad():
            scores = model(**features(test))
        assert len(tensors) == 8
    return World(root, features, test, scores)


def test_keys_and_scores_are_those_of_training(world: World) -> None:
    with (
        sr.local_serving("ctr", root=world.root) as serving,
        sr.ServingClient(serving.addresses) as client,
        sr.ServedModel(client, world.root) as served,
    ):
        assert set(served.columns) == set(world.test) - {"unused"}
        assert served.features is not None
        mine, theirs = world.features.set(world.test), served.features(world.test)
        for name, array in mine.items():
            other = theirs[name]
            if isinstance(array, Jagged):
                assert isinstance(other, Jagged)
                assert all(np.array_equal(one, two) for one, two in zip(array.parts, other.parts, strict=True))
            else:
                np.testing.assert_array_equal(array, other)
        torch.testing.assert_close(served(world.test), world.scores, rtol=1e-6, atol=1e-6)
        table = pa.table(world.test)
        torch.testing.assert_close(served(table.slice(7, 1)), world.scores[7:8], rtol=1e-6, atol=1e-6)
        batch = table.slice(0, 300).combine_chunks().to_batches()[0]
        torch.testing.assert_close(served.predict(batch).output, world.scores[:300], rtol=1e-6, atol=1e-6)
        lists: dict[str, list[Any]] = {"history": [None], "tags": [[]], "weight": [[]]}
        empty = {name: values[:1] for name, values in world.test.items()} | lists
        assert served(empty).shape == (1,)
        with pytest.raises(
            sr.errors.InvalidArgument, match="ServedModel: column 'age' of feature 'age': there is no such"
        ):
            served({"user_id": ["x"]})
        tensors = world.features({name: values[:9] for name, values in world.test.items()})
        torch.testing.assert_close(served(*tensors.values()), world.scores[:9], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl", "csv"])
def test_a_file_is_scored_by_its_columns(world: World, kind: str, tmp_path: Path) -> None:
    """A CSV file has no lists, so that such a model refuses one; the others give the scores of training."""
    rows, path, output = 100, tmp_path / f"rows.{kind}", tmp_path / "scores.csv"
    table = pa.table({name: values[:rows] for name, values in world.test.items()})
    if kind == "parquet":
        pa.parquet.write_table(table, path, row_group_size=33)
    elif kind == "arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    elif kind == "jsonl":
        import json

        path.write_text("".join(f"{json.dumps(row, default=str)}\n" for row in table.to_pylist()))
    else:
        pa.csv.write_csv(table.drop_columns(["tags", "weight", "history"]), path)
    with sr.local_serving("ctr", root=world.root) as serving, pytest.raises(SystemExit) as ended:
        main(
            ["predict", "--model=ctr", f"--root={world.root}", f"--serving={','.join(serving.addresses)}",
             f"--input={path}", f"--output={output}", "--batch-rows=40"]
        )  # fmt: skip
    if kind == "csv":
        assert ended.value.code == 1
        return
    assert ended.value.code == 0
    scores = np.array([float(line) for line in output.read_text().splitlines()])
    np.testing.assert_allclose(scores, world.scores[:rows].numpy(), rtol=1e-5, atol=1e-6)


def test_damaged_features_are_not_served(world: World, tmp_path: Path) -> None:
    import shutil

    root = tmp_path / "models"
    shutil.copytree(world.root, root)
    registry = ModelRegistry(str(root))
    names = [file.file for file in registry.manifest("ctr", 1).features]
    assert names == ["features.json", "vocabulary.0.txt"]
    for name in names:
        path = root / "ctr" / "v000001" / name
        whole = path.read_bytes()
        path.write_bytes(whole.replace(b"c", b"d", 1))
        with (
            sr.local_serving("ctr", root=str(root)) as serving,
            sr.ServingClient(serving.addresses) as client,
            pytest.raises(sr.errors.DataLoss, match=name),
        ):
            sr.ServedModel(client, str(root))
        path.write_bytes(whole)


def test_arguments_must_be_features(world: World) -> None:
    from sparserow.worker.publish.featured_program import arguments_of

    class Other(nn.Module):
        def forward(self, user: Tensor, other: Tensor, extra: float = 0.0) -> Tensor:
            return user + other + extra

    with pytest.raises(
        sr.errors.InvalidArgument, match="the argument 'other' of forward is no feature; features: user"
    ):
        arguments_of(Other(), ("user",))
    with pytest.raises(sr.errors.InvalidArgument, match="forward has no argument 'age'; its arguments: user, other"):
        arguments_of(Other(), ("user", "other", "age"))
    assert arguments_of(Other(), ("other", "user")) == ("user", "other")


def test_a_version_without_features_takes_tensors_alone(tmp_path: Path) -> None:
    root = str(tmp_path / "plain")

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(100, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids).sum(1)

    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, "plain") as session:
        model = session.distribute(Plain(), optimizer=sr.optim.SGD(lr=0.1), min_rows=1)
        session.publish("plain", root=root, model=model, example=(torch.arange(4),))
    with (
        sr.local_serving("plain", root=root) as serving,
        sr.ServingClient(serving.addresses) as client,
        sr.ServedModel(client, root) as served,
    ):
        assert (served.columns, served.features) == ((), None)
        with pytest.raises(sr.errors.FailedPrecondition, match="version 1 was published without features"):
            served({"ids": [1]})


TABLES = {"user": "users", "tags": "tag_bags", "history": "histories"}


def test_rows_are_found_by_values(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command, over HTTP and in Python; the keys are those that training made."""
    user = next(value for value in world.test["user_id"] if value is not None)
    key = int(world.features({**{name: values[:1] for name, values in world.test.items()}, "user_id": [user]})["user"])
    with (
        sr.local_serving("ctr", root=world.root, shards=2) as serving,
        sr.ServingClient(serving.addresses) as client,
    ):
        named = f"--serving={','.join(serving.addresses)}"

        def query(*arguments: str) -> tuple[int, str, str]:
            with pytest.raises(SystemExit) as ended:
                main(["query", *arguments, named])
            out, err = capsys.readouterr()
            return int(ended.value.code or 0), out, err

        rows, found = client.lookup("users", [key])
        assert found.all()
        assert client.make_keys("user", [user]).tolist() == [key]
        code, out, _ = query("users", f"--feature=user={user}", str(key), "--feature=user=nobody")
        assert code == 0
        first, second, third, version = out.splitlines()
        shown = " ".join(f"{value:.6g}" for value in rows[0])
        assert (first, second) == (f"{key}: {shown}", f"user={user}: {shown}")
        assert third.startswith("user=nobody: ")
        assert third.endswith("(default row)")
        assert version == "model ctr version 1"
        for feature, value in (("tags", "t7"), ("history", "11")):
            code, out, err = query(TABLES[feature], f"--feature={feature}={value}")
            assert code == 0, err
            assert "(default row)" not in out
        assert "makes its keys by them: --feature NAME=VALUE" in query("users", user, "--hash")[2]
        for arguments, words in (
            (("users",), "nothing to look up; give KEYS, or --feature NAME=VALUE"),
            (("users", "--feature=user"), "--feature: 'user' is not allowed; allowed: NAME=VALUE"),
            (("users", "--feature=age=3"), "feature: 'age' is not allowed; allowed: user, age_bucket, tags, history, "),
            (("users", "--feature=where=x"), "feature: 'where' is not allowed; allowed: user, age_bucket, tags"),
            (("users", "--feature=age_bucket=old"), "feature 'age_bucket': a value is no number"),
            (("nothing", f"--feature=user={user}"), "table 'nothing' is not in model 'ctr'"),
        ):
            code, _, err = query(*arguments)
            assert words in err
            assert code == 1


def test_rows_are_found_by_values_over_http(world: World, launcher: Launcher) -> None:
    user = next(value for value in world.test["user_id"] if value is not None)
    port = free_port()
    serving = launcher.start("serve", f"--root={world.root}", "--model=ctr", f"--port={port}", "--http-port=0")
    address = serving.wait_for(r"HTTP (\S+)\n")[1]
    serving.wait_for("ready at")
    with sr.ServingClient(f"127.0.0.1:{port}") as client:
        asked = {"users": {"feature": "user", "values": [user, "nobody"]}, "histories": [1]}
        reply = post(address, {"model": "ctr", "tables": asked})
        expected = client.lookup("users", client.make_keys("user", [user, "nobody"]))
        np.testing.assert_array_equal(reply["tables"]["users"]["rows"], expected.rows.astype(np.float64))
        assert reply["tables"]["users"]["found"] == [True, False]
        assert reply["version"] == 1
    for wrong, words in (
        ({"feature": "user"}, "allowed: a list of keys, or"),
        ({"feature": 3, "values": ["u1"]}, "allowed: a list of keys, or"),
        ({"feature": "user", "values": [True]}, "values: True is not allowed; allowed: texts and integers"),
        ({"feature": "user", "values": [1.5]}, "values: 1.5 is not allowed; allowed: texts and integers"),
        ({"feature": "user", "values": [], "x": 1}, "x: unknown key; known keys: feature, values"),
        ({"feature": "usr", "values": ["u1"]}, "feature: 'usr' is not allowed; allowed: user, age_bucket"),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(address, {"model": "ctr", "tables": {"users": wrong}})
        assert refused.value.code == 400
        assert words in json.loads(refused.value.read())["error"]


def post(address: str, body: Any) -> Any:
    request = urllib.request.Request(f"http://{address}/v1/lookup", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.loads(reply.read())


def test_values_of_a_version_without_features_are_refused(world: World, tmp_path: Path) -> None:
    root = str(tmp_path)
    with sr.local_cluster(shards=1) as cluster, sr.connect(cluster.address, "plain") as session:
        session.create_table("t", dim=2, optimizer=sr.optim.SGD(lr=1.0)).assign([1], [[1.0, 2.0]])
        session.publish("plain", root=root)
        with (
            sr.local_serving("plain", root=root) as serving,
            sr.ServingClient(serving.addresses) as client,
            pytest.raises(sr.errors.FailedPrecondition, match="plain@1 was published without features; look up keys"),
        ):
            client.make_keys("user", ["u1"])


@pytest.mark.parametrize("rows", [None, 7])
def test_keys_of_values_are_those_of_a_column(world: World, rows: int | None) -> None:
    features = replace(world.features.set, rows={} if rows is None else {"user": rows, "hour": rows, "tags": rows})
    table = world.features.set(world.test)
    columns = {"user": "user_id", "age_bucket": "age", "hour": "moment", "city": "city"}
    for name, column in columns.items():
        given = [i for i, value in enumerate(world.test[column]) if value is not None][:200]
        texts = [str(world.test[column][i]) for i in given]
        expected = table[name][given]
        found = keys_of_values(features, name, texts)
        np.testing.assert_array_equal(found, expected % rows if rows and name in features.rows else expected, name)
    tags = table["tags"]
    texts = [each for some in world.test["tags"] for each in some]
    expected = tags.values % rows if rows else tags.values
    np.testing.assert_array_equal(keys_of_values(features, "tags", texts), expected)
    assert keys_of_values(features, "user", []).shape == (0,)
    refusing = replace(features, features=(sr.features.SplitFeature("user", column="user_id"),))
    with pytest.raises(sr.errors.InvalidArgument, match=r"feature 'user': value 'a\|b' gives no key, or several"):
        keys_of_values(refusing, "user", ["a", "a|b"])
